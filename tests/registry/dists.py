"""Distributions that exist only as metadata and modules in a folder on the import path."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

COUNTER = itertools.count()

BACKEND = """
from dataclasses import dataclass
from lmcache_core.spi import AbstractBackend, Capabilities, MemoryKind

@dataclass(frozen=True)
class Options:
    url: str = ""

class Backend(AbstractBackend):
    config_type = Options
    capabilities = Capabilities(ranges=True, max_batch=7)
    def __init__(self, config, context): ...
    async def aclose(self): ...
    async def lookup(self, keys, /, *, deadline=None): return []
    async def load(self, batch, /, *, done=None, deadline=None): return []
    async def store(self, batch, /, *, done=None, deadline=None): return []
    async def delete(self, keys, /): return 0
"""

MakeDist = Callable[..., str]


@pytest.fixture
def make_dist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeDist]:
    """Write ``NAME-VERSION.dist-info`` with entry points, and one module behind them.

    Returns the module's name. In targets ``MODULE`` stands for it.
    """
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    made: list[str] = []

    def make(
        name: str,
        entry_points: Mapping[str, Mapping[str, str]],
        source: str = BACKEND,
        version: str = "1.2",
    ) -> str:
        module = f"fake_plugin_{next(COUNTER)}"
        made.append(module)
        (folder / f"{module}.py").write_text(source)
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = []
        for kind, names in entry_points.items():
            lines.append(f"[lmcache_core.{kind}]")
            lines += [f"{n} = {t.replace('MODULE', module)}" for n, t in names.items()]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        # The set of installed distributions changed under one and the same import path.
        from lmcache_core import registry

        registry._installed.cache_clear()
        return module

    yield make
    from lmcache_core import registry

    registry._installed.cache_clear()
    for module in made:
        sys.modules.pop(module, None)
