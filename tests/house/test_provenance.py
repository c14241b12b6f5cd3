"""What is installed under our names came from this tree, never from an index."""

import json
from importlib import import_module
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
from catalogue import read

import lmcache
import lmcache_core

CATALOGUE = read()
NAMES = {"lmcache", *CATALOGUE.dists}
OURS = [dist for dist in distributions() if dist.name in NAMES]


def test_the_root_is_installed() -> None:
    assert "lmcache" in {dist.name for dist in OURS}


@pytest.mark.parametrize("dist", OURS, ids=lambda dist: dist.name)
def test_a_distribution_came_from_a_local_folder_and_carries_the_label(dist: Distribution) -> None:
    assert dist.version == CATALOGUE.version
    origin = json.loads(dist.read_text("direct_url.json") or "{}")
    assert origin.get("url", "").startswith("file://"), (
        f"{dist.name} came from {origin or 'an index'}"
    )
    assert dist.metadata.get_all("Classifier", []).count("Private :: Do Not Upload") == 1


def test_import_paths_lie_in_the_tree(root: Path) -> None:
    for module in (lmcache, lmcache_core):
        assert module.__file__ is not None
        assert Path(module.__file__).is_relative_to(root)


def test_plugin_packages_lie_in_the_tree(root: Path) -> None:
    installed = {dist.name for dist in OURS}
    for row in CATALOGUE.rows:
        if row.dist in installed and row.dist not in ("lmcache", "lmcache-native"):
            module = import_module(row.package)
            assert module.__file__ is not None
            assert Path(module.__file__).is_relative_to(root / row.path)


def test_the_version_is_one(root: Path) -> None:
    assert lmcache.__version__ == lmcache_core.__version__ == CATALOGUE.version
    assert "+" in CATALOGUE.version, "a label that no index accepts"
    assert int(CATALOGUE.version.split(".")[0]) >= 2026
