"""Another daemon's memory and tiers as one tier of this cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lmcache_backend_lmcache.client import Client
from lmcache_backend_lmcache.config import LMCacheConfig
from lmcache_core.spi import (
    BlockingBackend,
    Capabilities,
    Closed,
    Context,
    Found,
    Key,
    Load,
    Loaded,
    ScanPage,
    Store,
    Stored,
    Usage,
)


class LMCacheBackend(BlockingBackend):
    """Values in another daemon: read and written in place on one node, streamed between nodes.

    It may evict what it has, so a lookup is a hint. A daemon that is gone is connected again in the
    background; until then every verb is ``Unavailable`` at once.
    """

    config_type = LMCacheConfig
    capabilities = Capabilities(
        ranges=True,
        scan=True,
        usage=True,
        ttl=True,
        shared=True,
        hints=True,
        iov_max=1024,
        max_value=1 << 32,
    )
    config: LMCacheConfig

    def __init__(self, config: LMCacheConfig, context: Context, /) -> None:
        super().__init__(config, context)
        self._client: Client | None = None

    @property
    def client(self) -> Client:
        if self._client is None:
            raise Closed("lmcache backend is not open", operation="client")
        return self._client

    def open_blocking(self) -> None:
        self._client = Client(self.config, self.context.tier)
        self.capabilities = replace(
            self.capabilities, ranges=self._client.local, quiescence_s=self.config.timeout + 1.0
        )

    def close_blocking(self) -> None:
        if self._client is not None:
            self._client.close()

    def lookup_blocking(self, keys: Sequence[Key], /) -> Sequence[Found | None]:
        return self.client.find(keys)

    def load_blocking(self, load: Load, /) -> Loaded:
        return self.client.load(load)

    def store_blocking(self, store: Store, /) -> Stored:
        return self.client.store(store)

    def delete_blocking(self, keys: Sequence[Key], /) -> int:
        return self.client.delete(keys)

    async def scan(self, after: str | None = None, /, *, limit: int = 1000) -> ScanPage:
        return await self.call("scan", self.client.scan, after, limit)

    async def usage(self) -> Usage:
        return await self.call("usage", self.client.usage)

    def footprint(self, nbytes: int, /) -> int:
        return max(1, -(-nbytes // 4096)) * 4096
