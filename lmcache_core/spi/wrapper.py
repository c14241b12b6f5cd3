"""Behaviour around a backend that is itself a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmcache_core.spi.backend import (
    AbstractBackend,
    Capabilities,
    Found,
    Load,
    LoadDone,
    Loaded,
    ScanPage,
    Store,
    Stored,
    StoreDone,
    Usage,
)
from lmcache_core.spi.buffers import Region, ResidentPool
from lmcache_core.spi.context import Context
from lmcache_core.spi.keys import Key


class Wrapper(AbstractBackend):
    """Passes every verb on; subclasses change what they are about, and say so in ``capabilities``.

    Found in the entry-point group ``lmcache_core.wrappers`` and named in a tier's ``wrappers`` mapping.
    """

    def __init__(self, config: Any, context: Context, inner: AbstractBackend, /) -> None:
        self.config = config
        self.context = context
        self.inner = inner

    async def open(self) -> None:
        await self.inner.open()
        self.capabilities: Capabilities = self.inner.capabilities

    async def aclose(self) -> None:
        await self.inner.aclose()

    async def lookup(
        self, keys: Sequence[Key], /, *, deadline: float | None = None
    ) -> Sequence[Found | None]:
        return await self.inner.lookup(keys, deadline=deadline)

    async def load(
        self, batch: Sequence[Load], /, *, done: LoadDone = None, deadline: float | None = None
    ) -> Sequence[Loaded]:
        return await self.inner.load(batch, done=done, deadline=deadline)

    async def store(
        self, batch: Sequence[Store], /, *, done: StoreDone = None, deadline: float | None = None
    ) -> Sequence[Stored]:
        return await self.inner.store(batch, done=done, deadline=deadline)

    async def delete(self, keys: Sequence[Key], /) -> int:
        return await self.inner.delete(keys)

    def footprint(self, nbytes: int, /) -> int:
        return self.inner.footprint(nbytes)

    @property
    def pool(self) -> ResidentPool:
        return self.inner.pool

    async def lookup_prefix(self, keys: Sequence[Key], /) -> int:
        return await self.inner.lookup_prefix(keys)

    async def scan(self, after: str | None = None, /, *, limit: int = 1000) -> ScanPage:
        return await self.inner.scan(after, limit=limit)

    async def usage(self) -> Usage:
        return await self.inner.usage()

    async def delete_exact(self, key: Key, etag: str, /) -> bool:
        return await self.inner.delete_exact(key, etag)

    async def hold(self, keys: Sequence[Key], seconds: float, /) -> Sequence[bool]:
        return await self.inner.hold(keys, seconds)

    async def register(self, region: Region, /) -> bool:
        return await self.inner.register(region)

    async def unregister(self, region: Region, /) -> None:
        await self.inner.unregister(region)
