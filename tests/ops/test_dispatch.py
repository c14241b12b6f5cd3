"""Which implementation of the byte operations runs, and what is said about it."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_core import ops

Offer = Callable[[str, str], None]
"""Install a distribution named so whose module has this source."""


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Offer]:
    """Fresh choice of the implementation, in a world where only what a test offers is installed."""

    def install(distribution: str, source: str) -> None:
        module = distribution.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[lmcache_core.ops]\nnative = {module}\n")

    bound = {name: vars(ops).pop(name) for name in ops.NAMES if name in vars(ops)}
    monkeypatch.delenv("LMCACHE_NATIVE", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *_without_native(sys.path)])
    ops._choose.cache_clear()
    yield install
    ops._choose.cache_clear()
    for name in ops.NAMES:
        vars(ops).pop(name, None)
    vars(ops).update(bound)


def _without_native(path: list[str]) -> list[str]:
    return [p for p in path if not any(Path(p or ".").glob("lmcache_native-*.dist-info"))]


GOOD = "INSTRUCTIONS = 'fast'\n" + "\n".join(
    f"def {name}(*a): return {name!r}" for name in ops.NAMES
)


def test_without_the_distribution_the_reference_runs_and_says_so(offer: Offer) -> None:
    """Seen in LMCache#180.

    Seen in LMCache#1507, LMCache#1746, LMCache#4195, LMCache#840, LMCache#388.
    """
    assert ops.copy is ops.Reference.copy
    assert ops.implementation() == "python, because lmcache-native is not installed"


def test_an_installed_distribution_takes_all_names_at_first_use(offer: Offer) -> None:
    offer("some-native", GOOD)
    assert "copy" not in vars(ops)
    assert ops.digest(b"", 0) != ops.Reference.digest(b"", 0)
    assert {vars(ops)[name]() for name in ops.NAMES} == set(ops.NAMES)
    assert ops.implementation() == "native: fast"


def test_the_environment_switches_it_off(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    offer("other-native", GOOD)
    monkeypatch.setenv("LMCACHE_NATIVE", "0")
    assert ops.digest is ops.Reference.digest
    assert ops.implementation() == "python, because LMCACHE_NATIVE=0"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise OSError('wrong machine')", "OSError: wrong machine"),
        ("INSTRUCTIONS = 'old'\ndef copy(): ...", "has no attribute 'digest'"),
    ],
)
def test_one_that_does_not_load_is_one_warning_and_the_reference(
    offer: Offer, caplog: pytest.LogCaptureFixture, source: str, reason: str
) -> None:
    offer(f"broken-native-{len(source)}", source)
    with caplog.at_level(logging.WARNING):
        assert ops.gather is ops.Reference.gather
        assert ops.scatter is ops.Reference.scatter
    assert [reason in record.getMessage() for record in caplog.records] == [True]
    assert reason in ops.implementation()


def test_two_distributions_of_one_name_are_a_conflict_and_not_a_lottery(
    offer: Offer, caplog: pytest.LogCaptureFixture
) -> None:
    offer("first-native", GOOD)
    offer("second-native", GOOD)
    assert ops.copy is ops.Reference.copy
    assert "first_native" in caplog.text
    assert "second_native" in caplog.text


def test_importing_the_module_looks_nothing_up() -> None:
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "from lmcache_core import ops\n"
        "new = set(sys.modules) - before\n"
        "dear = {'ctypes', 'importlib.metadata', 'lmcache_native', 'numpy', 'torch'}\n"
        "assert not dear & new, dear & new\n"
        "assert 'copy' not in vars(ops)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_an_ordinary_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'memcpy'"):
        ops.memcpy  # type: ignore[attr-defined]  # noqa: B018  the access is the test
