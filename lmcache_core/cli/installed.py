"""What ``lmcache doctor`` says of distributions that do not go together."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path

import lmcache_core
from lmcache_core._catalogue import CATALOGUE, Entry
from lmcache_core.cli.finding import Finding
from lmcache_core.registry import joined

NAME = "lmcache"
"""Our distribution and our redirects; LMCache 0.x has the same."""


def conflicts(catalogue: Sequence[Entry] = CATALOGUE) -> Iterator[Finding]:
    """Two distributions that overwrite each other's modules, LMCache 0.x in our place among them."""
    versions: dict[str, set[str]] = {}
    for dist in distributions():
        if dist.name:  # a leftover of a broken installation has none
            versions.setdefault(dist.name.lower().replace("_", "-"), set()).add(dist.version)
    for rivals in dict.fromkeys(entry.rivals for entry in catalogue if entry.rivals):
        here = [name for name in rivals if name in versions]
        if len(here) > 1:
            found = f"{joined(here)} are installed and overwrite each other's files"
            remedy = f"pip uninstall {' '.join(here)}, then install the one that is wanted"
            yield Finding("distributions", "fault", found, remedy)
    if others := sorted(versions.get(NAME, set()) - {lmcache_core.__version__}):
        found = f"{NAME} {joined(others)} is installed where {lmcache_core.__version__} runs"
        yield Finding("distributions", "fault", found, _AGAIN)
    elif not _redirects_are_ours():
        found = f"`import {NAME}` is not this installation's: {_place()}"
        yield Finding("distributions", "fault", found, _AGAIN)


_AGAIN = f"pip uninstall {NAME} until none is left, then install this one again"


def _place() -> Path | None:
    spec = importlib.util.find_spec(NAME)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _redirects_are_ours() -> bool:
    place = _place()
    return place is None or place.parent == Path(lmcache_core.__file__).parent.parent
