"""Wheels hold what they should: typed packages, no tests, the label, a small core."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import wheels
from catalogue import read

PURE = [".", *(path for path in read().paths if path != "csrc")]


@pytest.mark.slow
@pytest.mark.parametrize("folder", PURE)
def test_a_wheel_is_typed_labelled_and_holds_no_tests(
    root: Path, tmp_path: Path, folder: str
) -> None:
    pip_wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip_wheel, "-w", str(tmp_path), f"./{folder}"], cwd=root, check=True)
    built = {wheels.metadata(wheel)["Name"]: wheel for wheel in tmp_path.glob("*.whl")}
    assert len(built) == 1
    wheels.inspect(built)


def test_a_requirement_of_the_testing_extra_counts_as_third_party(tmp_path: Path) -> None:
    wheel = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "x-1.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: x\nVersion: 1\nRequires-Dist: lmcache==1\n"
            "Requires-Dist: pytest>=8; extra == 'testing'\nRequires-Dist: mypy; extra == 'dev'\n"
            "Requires-Dist: xxhash>=3\n",
        )
    assert wheels.third_party({"x": wheel}) == ["pytest>=8", "xxhash>=3"]
