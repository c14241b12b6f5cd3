"""What Mooncake's own client gives: one ``batch_put_from`` or ``batch_get_into`` for all values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmcache_backend_mooncake.config import MooncakeConfig
from lmcache_backend_mooncake.native import address, connect

from lmcache_core.spi import Key


class Raw:
    """A bare loop; a ``Mover`` of ``benchmarks/tiers.py``."""

    name, fills = "raw batches", True

    def __init__(self, config: MooncakeConfig) -> None:
        self._store, self._how = connect(config)

    def store(self, keys: Sequence[Key], values: Sequence[memoryview]) -> None:
        codes = self._store.batch_put_from(*self._words(keys, values), self._how)
        assert not any(codes), codes

    def load(self, keys: Sequence[Key], into: Sequence[memoryview]) -> None:
        codes = self._store.batch_get_into(*self._words(keys, into))
        assert codes == [view.nbytes for view in into], codes

    def clear(self, keys: Sequence[Key]) -> None:
        codes = self._store.batch_remove([key.text for key in keys], True)
        assert not any(codes), codes

    def close(self) -> None:
        self._store.close()

    def _words(self, keys: Sequence[Key], views: Sequence[memoryview]) -> tuple[Any, Any, Any]:
        return [key.text for key in keys], [address(v) for v in views], [v.nbytes for v in views]
