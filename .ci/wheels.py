"""Build every wheel, install them into a clean environment, and run the conformance kit from the wheels.

Catches what a checkout hides: undeclared dependencies, files left out, a missing py.typed. First-party
wheels come from the wheelhouse with no index at all; third-party ones from the index, in the versions of
constraints.txt. What needs an engine or torch is built and inspected, but not installed here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from catalogue import read
from setup import CONSTRAINTS, NATIVE, PIP, ROOT, WORK, native_lack

HOUSE = WORK / "wheelhouse"
CLEAN = WORK / "wheels-venv"
ELSEWHERE = WORK / "wheels-run"
EXAMPLE = ROOT / "examples/third_party_backend"
CORE_LIMIT = 3 * 10**6


def run(*command: str | Path, cwd: Path = ROOT, stop: bool = True) -> bool:
    """Run one command; stop the stage when it fails, or say whether it was good."""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LMCACHE_PLUGINS")
    }
    environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    words = [str(word) for word in command]
    good = subprocess.run(words, cwd=cwd, env=environment, check=False).returncode == 0
    if not good and stop:
        raise SystemExit(f"wheels: failed: {' '.join(words)}")
    return good


def build() -> dict[str, Path]:
    """Build all wheels; dist name -> wheel."""
    shutil.rmtree(HOUSE, ignore_errors=True)
    lack = native_lack()
    if lack:
        print(f"wheels: {lack}; lmcache-native is left out")
    folders = [".", *(f"./{path}" for path in read().paths if path != NATIVE or not lack)]
    if EXAMPLE.exists():
        folders.append(f"./{EXAMPLE.relative_to(ROOT)}")
    pip_wheel = (sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation")
    for folder in folders:
        run(*pip_wheel, "-w", HOUSE, folder)
    return {metadata(wheel)["Name"]: wheel for wheel in sorted(HOUSE.glob("*.whl"))}


def metadata(wheel: Path) -> dict[str, str]:
    """Name and version of a wheel, and its requirements under ``Requires-Dist``, one a line."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        parsed = HeaderParser().parsestr(archive.read(name).decode())
    requires = "\n".join(parsed.get_all("Requires-Dist") or [])
    return {"Name": parsed["Name"], "Version": parsed["Version"], "Requires-Dist": requires}


def inspect(wheels: dict[str, Path]) -> None:
    """Every package is typed, nothing foreign is inside, the core is small, the label is there."""
    catalogue = read()
    for name, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            sizes = {info.filename: info.file_size for info in archive.infolist()}
        packages = {f.split("/")[0] for f in sizes if "/" in f and ".dist-info/" not in f}
        for package in packages:
            if f"{package}/py.typed" not in sizes:
                raise SystemExit(f"wheels: {wheel.name}: {package} lacks py.typed")
        # deeper ones may be part of a template
        if any(
            part in f.split("/")[:2] for f in sizes for part in ("tests", "build", "__pycache__")
        ):
            raise SystemExit(f"wheels: {wheel.name}: holds tests, build results or byte code")
        ours = name in ("lmcache", *catalogue.dists)
        if ours and metadata(wheel)["Version"] != catalogue.version:
            raise SystemExit(f"wheels: {wheel.name}: version is not {catalogue.version}")
        total = sum(sizes.values())
        if name == "lmcache" and total > CORE_LIMIT:
            raise SystemExit(f"wheels: the core installs {total} bytes, over {CORE_LIMIT}")
        print(
            f"wheels: {wheel.name}: {wheel.stat().st_size / 1e3:.0f} kB, {total / 1e3:.0f} kB installed"
        )


def third_party(wheels: dict[str, Path]) -> list[str]:
    """Requirements of the wheels that are not ours: those of the core's `testing` extra too, and of variants without CUDA."""
    found = []
    for wheel in wheels.values():
        for line in metadata(wheel)["Requires-Dist"].splitlines():
            requirement, _, marker = line.partition(";")
            wanted = not marker or re.search(r"extra == ['\"](testing|cpu)['\"]", marker)
            if wanted and not requirement.strip().startswith("lmcache"):
                found.append(requirement.strip())
    return sorted(set(found))


def install(wheels: dict[str, Path]) -> None:
    """Ours without an index, then what they need from it; then nothing may be missing."""
    run(sys.executable, "-m", "venv", "--clear", CLEAN)
    pip = (CLEAN / "bin/python", "-m", "pip", "install", "-qq")
    run(*pip, PIP)
    run(*pip, "--no-index", "--no-deps", *wheels.values())
    versions = WORK / "versions.txt"
    lines = CONSTRAINTS.read_text().splitlines(True)
    versions.write_text("".join(line for line in lines if not line.startswith("lmcache")))
    run(*pip, "-c", versions, *third_party(wheels))
    run(CLEAN / "bin/python", "-m", "pip", "check")


def conformance(wheels: dict[str, Path]) -> int:
    """Run each distribution's conformance tests far from the tree; the number of distributions."""
    shutil.rmtree(ELSEWHERE, ignore_errors=True)
    python = CLEAN / "bin/python"
    sources = {dist: ROOT / path / "tests" for dist, path, _ in read().distributions}
    sources["third-party example"] = EXAMPLE / "tests"
    count, failed = 0, []
    for name, folder in sources.items():
        if name in read().dists and name not in wheels:
            continue
        tests = sorted(folder.glob("test_conformance*.py"))
        if not tests:
            continue
        here = ELSEWHERE / name.replace(" ", "-")
        here.mkdir(parents=True)
        for test in tests:
            shutil.copy(test, here)
            for module in re.findall(
                r"^from (tests\.[\w.]+) import", test.read_text(), re.MULTILINE
            ):
                needed = Path(*module.split(".")).with_suffix(".py")  # starts a server, say
                (here / needed).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / needed, here / needed)
        print(f"wheels: conformance of {name}", flush=True)
        strict = ("-W", "error", "--import-mode=importlib", "--rootdir", here, here)
        once_more = ("--last-failed", "--last-failed-no-failures=none")  # for why, see tests.sh
        pytest = (python, "-m", "pytest", "-q", *strict)
        if not run(*pytest, cwd=here, stop=False) and not run(
            *pytest, *once_more, cwd=here, stop=False
        ):
            failed.append(name)
        count += 1
    if failed:
        raise SystemExit(f"wheels: conformance failed: {', '.join(failed)}")
    return count


PROBE = """
import sys, lmcache, lmcache_core
assert lmcache.__file__.startswith(sys.prefix), lmcache.__file__
assert lmcache_core.__file__.startswith(sys.prefix), lmcache_core.__file__
assert "torch" not in sys.modules and "numpy" not in sys.modules
print("wheels: lmcache", lmcache.__version__, "from", "the wheels")
"""


def main() -> int:
    """Build, inspect, install, run."""
    wheels = build()
    inspect(wheels)
    engines = {row.dist for row in read().rows if row.kind == "engines"}
    light = {name: wheel for name, wheel in wheels.items() if name not in engines}
    for name in sorted(engines & wheels.keys()):
        print(f"wheels: {name} needs an engine and torch: built and inspected only")
    install(light)
    ELSEWHERE.mkdir(exist_ok=True)
    run(CLEAN / "bin/python", "-c", PROBE, cwd=ELSEWHERE)
    for words in (("--help",), ("plugins",)):
        run(CLEAN / "bin/lmcache", *words, cwd=ELSEWHERE)
    count = conformance(light)
    if not count:
        raise SystemExit("wheels: no conformance test ran")
    print(f"wheels: {len(wheels)} wheels, conformance of {count} distributions from them")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
