"""Host memory to host memory, in the calling thread: every fence is reached when the call returns."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from lmcache_core import ops
from lmcache_core.spi import Copied, Fence, GPUConnector, PageSpec


class Reached(Fence):
    """A copy that is over."""

    def __init__(self, copied: Copied) -> None:
        self._copied = copied

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None, /) -> Copied | None:
        return self._copied


class CPUConnector(GPUConnector):
    """See ``GPUConnector``; the copies are ``ops.gather`` and ``ops.scatter``.

    Args:
        threads: cores used by one large copy.
    """

    def __init__(self, *, threads: int = 1) -> None:
        self._threads = threads
        self._tensors: Mapping[str, Any] = {}
        self._specs: tuple[PageSpec, ...] = ()
        self._tables: dict[tuple[int, tuple[int, ...] | None], ops.PlaneTable] = {}

    def bind(self, tensors: Mapping[str, Any], specs: Sequence[PageSpec], /) -> None:
        self._tensors = dict(tensors)
        self._specs = tuple(specs)
        self._tables.clear()

    def pack(
        self,
        group: int,
        blocks: Sequence[int],
        first: int,
        count: int,
        into: memoryview,
        /,
        *,
        seed: int | None = None,
        layers: Sequence[int] | None = None,
        stream: Any = None,
    ) -> Fence:
        table = self._table(group, layers)
        digests = ops.gather(
            table, array("q", blocks), first, count, into, seed=seed, threads=self._threads
        )
        return Reached(Copied(digests))

    def unpack(
        self,
        group: int,
        blocks: Sequence[int],
        first: int,
        count: int,
        source: memoryview,
        /,
        *,
        seed: int | None = None,
        digests: bytes | None = None,
        layers: Sequence[int] | None = None,
        stream: Any = None,
    ) -> Fence:
        table = self._table(group, layers)
        bad = ops.scatter(
            table,
            array("q", blocks),
            first,
            count,
            source,
            seed=seed,
            digests=digests,
            threads=self._threads,
        )
        return Reached(Copied(None, bad))

    def close(self) -> None:
        self._tensors, self._specs = {}, ()
        self._tables.clear()

    def _table(self, group: int, layers: Sequence[int] | None) -> ops.PlaneTable:
        wanted = None if layers is None else tuple(layers)
        table = self._tables.get((group, wanted))
        if table is None:
            specs = [
                spec
                for spec in self._specs
                if spec.group == group and (wanted is None or spec.layer in wanted)
            ]
            if not specs:
                known = sorted({spec.group for spec in self._specs})
                raise ValueError(f"nothing is bound for group {group} (bound: {known})")
            table = self._tables[group, wanted] = ops.PlaneTable(specs)
        return table
