"""Distributions that overwrite each other are reported; what belongs together is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lmcache_core._catalogue import Entry
from lmcache_core.cli.installed import conflicts
from tests.registry.dists import MakeDist

RIVALS = ("acme-engine", "acme-engine-non-cuda")
CATALOGUE = [
    Entry(
        kind="backends", name=name, dist=f"acme-{name}", path=name, object="acme:Backend",
        rivals=RIVALS,
    )
    for name in ("one", "two")
]  # fmt: skip


def test_this_installation_has_no_conflict() -> None:
    assert list(conflicts()) == []


def test_two_rivals_are_reported_once_and_one_is_not(make_dist: MakeDist) -> None:
    make_dist("acme_engine", {})
    assert list(conflicts(CATALOGUE)) == []
    make_dist("acme-engine-non-cuda", {})
    (finding,) = conflicts(CATALOGUE)
    assert finding.state == "fault"
    assert finding.found == (
        "acme-engine and acme-engine-non-cuda are installed and overwrite each other's files"
    )
    assert finding.remedy.startswith("pip uninstall acme-engine acme-engine-non-cuda, then ")


def test_both_wheels_of_mooncake_are_reported(make_dist: MakeDist) -> None:
    make_dist("mooncake-transfer-engine", {})
    make_dist("mooncake-transfer-engine-non-cuda", {})
    (finding,) = conflicts()
    assert finding.state == "fault"
    assert finding.found == (
        "mooncake-transfer-engine and mooncake-transfer-engine-non-cuda are installed"
        " and overwrite each other's files"
    )


def test_another_distribution_of_our_name_is_reported(make_dist: MakeDist) -> None:
    make_dist("lmcache", {}, version="0.5.6")
    (finding,) = conflicts()
    assert finding.state == "fault"
    assert finding.found.startswith("lmcache 0.5.6 is installed where ")


def test_redirects_of_another_place_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lmcache").mkdir()
    (tmp_path / "lmcache/__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "lmcache"]:
        monkeypatch.delitem(sys.modules, name)
    (finding,) = conflicts()
    assert finding.found == f"`import lmcache` is not this installation's: {tmp_path / 'lmcache'}"
