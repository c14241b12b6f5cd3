"""The tier: a client library that knows nothing of us, and what the laws ask for on top of it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pymemcache import MemcacheError, PooledClient  # type: ignore[import-untyped]
from pymemcache.exceptions import MemcacheServerError  # type: ignore[import-untyped]

from lmcache_backend_memcached.config import MemcachedConfig
from lmcache_core import spi

OVERHEAD = 1024
"""What the server's limit for one item counts besides the value."""
MONTH = 30 * 86400
"""Longest time to live that the protocol reads as seconds from now; longer ones are dates."""


class MemcachedBackend(spi.BlockingBackend):
    """Values as items of one server, which may evict any of them; nothing can be listed."""

    config_type = MemcachedConfig
    capabilities = spi.Capabilities(
        usage=True, ttl=True, shared=True, persistent=True, hints=True,
        durability=spi.Durability.PROCESS,
    )  # fmt: skip
    config: MemcachedConfig

    @classmethod
    def testing_config(cls) -> MemcachedConfig:
        from lmcache_backend_memcached.serving import shared_server

        return MemcachedConfig(server=shared_server().path)

    def open_blocking(self) -> None:
        timeout = float(self.config.timeout)
        self.client = PooledClient(
            self.config.address, connect_timeout=timeout, timeout=timeout, no_delay=True,
            max_pool_size=self.config.threads, key_prefix=self.config.prefix.encode(),
        )  # fmt: skip
        limit = int(self.ask(self.client.stats, "settings")[b"item_size_max"])
        self.capabilities = replace(
            self.capabilities, max_value=limit - OVERHEAD, quiescence_s=2 * timeout + 1
        )

    def close_blocking(self) -> None:
        if hasattr(self, "client"):
            self.client.close()

    def lookup_blocking(self, keys: Sequence[spi.Key], /) -> Sequence[spi.Found | None]:
        answers = [
            self.ask(self.client.raw_command, f"mg {self.config.prefix}{key.text} s")
            for key in keys
        ]
        return [
            spi.Found(int(said.split(b" s")[1]), promise=False) if said.startswith(b"HD") else None
            for said in answers
        ]

    def load_blocking(self, load: spi.Load, /) -> spi.Loaded:
        value: bytes | None = self.ask(self.client.get, load.key.text)
        if value is None:
            return spi.MISSED
        if len(value) > load.room:
            raise spi.BufferTooSmall(f"{load.key!r} needs {len(value)} bytes, got {load.room}")
        load.into[0][: len(value)] = value
        return spi.Loaded.filled(len(value))

    def store_blocking(self, store: spi.Store, /) -> spi.Stored:
        seconds = 0 if store.ttl is None else min(math.ceil(store.ttl) or 1, MONTH)
        value = b"".join(store.parts)
        try:
            new = self.ask(self.client.add, store.key.text, value, expire=seconds, noreply=False)
        except MemcacheServerError as error:
            return spi.Stored.refused(f"server said: {error}")
        return spi.STORED if new else spi.PRESENT

    def delete_blocking(self, keys: Sequence[spi.Key], /) -> int:
        return sum(self.ask(self.client.delete, key.text, noreply=False) for key in keys)

    async def usage(self) -> spi.Usage:
        said = await self.call("usage", self.ask, self.client.stats)
        nbytes, values, limit = (said[n] for n in (b"bytes", b"curr_items", b"limit_maxbytes"))
        return spi.Usage(nbytes, values, limit)

    def ask(self, call: Callable[..., Any], /, *words: Any, **options: Any) -> Any:
        """Call the client; what it raises becomes an error of the contract (``OSError`` does by itself)."""
        try:
            return call(*words, **options)
        except MemcacheServerError:
            raise
        except MemcacheError as error:
            raise spi.Unavailable(
                f"{self.config.server}: {error or type(error).__name__}"
            ) from error
