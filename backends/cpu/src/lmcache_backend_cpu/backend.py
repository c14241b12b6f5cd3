"""The resident pool as a backend: a load is lease, copy, release; a store is reserve, copy, commit."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_backend_cpu.config import CPUConfig
from lmcache_core import ops
from lmcache_core.spi import (
    MISSED,
    PRESENT,
    STORED,
    BlockingBackend,
    Capabilities,
    Closed,
    Context,
    Found,
    Key,
    Load,
    Loaded,
    MemoryOptions,
    Refusal,
    ResidentPool,
    ScanPage,
    Store,
    Stored,
    Usage,
    fill,
)


class CPUBackend(BlockingBackend):
    """Values in host memory.

    The manager works on ``pool`` directly; the verbs are for everybody else and copy on the tier's threads.
    A store of a key that another store is writing at that moment is refused, not awaited.
    """

    config_type = CPUConfig
    capabilities = Capabilities(
        ranges=True,
        scan=True,
        usage=True,
        resident=True,
        hints=True,
        iov_max=1024,
        quiescence_s=1.0,
    )
    config: CPUConfig

    def __init__(self, config: CPUConfig, context: Context, /) -> None:
        super().__init__(config, context)
        self._pool: ResidentPool | None = None

    @classmethod
    def testing_config(cls) -> CPUConfig:
        return CPUConfig(populate=False)

    @property
    def pool(self) -> ResidentPool:
        if self._pool is None:
            raise Closed("cpu backend is not open", operation="pool")
        return self._pool

    def open_blocking(self) -> None:
        config = self.config
        self._pool = self.context.create_pool(
            MemoryOptions(config.huge_pages, config.numa_node, config.populate)
        )

    def close_blocking(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def lookup_blocking(self, keys: Sequence[Key], /) -> Sequence[Found | None]:
        lengths = self.pool.lengths(keys)
        return [None if nbytes is None else Found(nbytes, promise=False) for nbytes in lengths]

    def load_blocking(self, load: Load, /) -> Loaded:
        leases = self.pool.lease([load.key], self)
        try:
            (lease,) = leases
            if lease is None:
                return MISSED
            return fill(load, lease.view, ops.copy)
        finally:
            self.pool.release(leases)

    def store_blocking(self, store: Store, /) -> Stored:
        (answer,) = self.pool.reserve([(store.key, store.nbytes)], self)
        if isinstance(answer, Refusal):
            return PRESENT if answer is Refusal.PRESENT else Stored.refused(answer.value)
        try:
            at = 0
            for part in store.parts:
                ops.copy(answer.view[at : at + part.nbytes], part)
                at += part.nbytes
            stored = self.pool.commit(answer, ops.digest(answer.view, 0))
            return STORED if stored else Stored.refused("closed meanwhile")
        finally:
            self.pool.abort(answer)

    def delete_blocking(self, keys: Sequence[Key], /) -> int:
        return self.pool.drop(keys)

    async def scan(self, after: str | None = None, /, *, limit: int = 1000) -> ScanPage:
        self.check_open("scan")
        values, then = self.pool.scan(int(after or 0), limit)
        listed = [(key, Found(nbytes, promise=False)) for key, nbytes in values]
        return ScanPage(listed, None if then is None else str(then))

    async def usage(self) -> Usage:
        self.check_open("usage")
        nbytes, values = self.pool.usage()
        return Usage(nbytes, values, self.pool.capacity)

    def footprint(self, nbytes: int, /) -> int:
        return max(1, -(-nbytes // 4096)) * 4096
