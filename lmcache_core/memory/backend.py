"""The executable specification of a backend: where the laws leave a question open, this is the answer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple, TypeVar

from lmcache_core import ops
from lmcache_core.spi import (
    MISSED,
    PRESENT,
    STORED,
    AbstractBackend,
    ByteSize,
    Capabilities,
    Closed,
    Context,
    Found,
    Key,
    Load,
    LoadDone,
    Loaded,
    ScanPage,
    Store,
    Stored,
    StoreDone,
    Usage,
    fill,
)

R = TypeVar("R")
ONE_GIB = ByteSize(1 << 30)


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """Attributes:
    size: most bytes held; a store beyond it is refused.
    """

    size: ByteSize = ONE_GIB


class _Value(NamedTuple):
    content: bytes
    etag: str
    expires: float | None


class MemoryBackend(AbstractBackend):
    """A dictionary of bytes. Every verb is one step of the loop, so nothing can be seen half done."""

    config_type = MemoryConfig
    capabilities = Capabilities(
        ranges=True,
        scan=True,
        usage=True,
        ttl=True,
        conditional_delete=True,
        prefix_lookup=True,
        iov_max=1024,
        quiescence_s=0.0,
    )

    def __init__(self, config: MemoryConfig, context: Context, /) -> None:
        self.config = config
        self.context = context
        self._values: dict[Key, _Value] = {}
        self._nbytes = 0
        self._stores = 0
        self._closed = False

    @classmethod
    def testing_config(cls) -> MemoryConfig:
        return MemoryConfig(ByteSize(1 << 26))

    async def aclose(self) -> None:
        self._closed = True
        self._values.clear()
        self._nbytes = 0

    async def lookup(
        self, keys: Sequence[Key], /, *, deadline: float | None = None
    ) -> Sequence[Found | None]:
        self._check("lookup")
        return [self._found(key) for key in keys]

    async def load(
        self,
        batch: Sequence[Load],
        /,
        *,
        done: LoadDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Loaded]:
        self._check("load", batch)
        return _each(self._load, batch, done)

    async def store(
        self,
        batch: Sequence[Store],
        /,
        *,
        done: StoreDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Stored]:
        self._check("store", batch)
        return _each(self._store, batch, done)

    async def delete(self, keys: Sequence[Key], /) -> int:
        self._check("delete")
        return sum(self._forget(key) for key in keys)

    async def lookup_prefix(self, keys: Sequence[Key], /) -> int:
        self._check("lookup_prefix")
        return len(list(takewhile(self._value, keys)))

    async def scan(self, after: str | None = None, /, *, limit: int = 1000) -> ScanPage:
        self._check("scan")
        keys = sorted(key for key in list(self._values) if self._value(key))
        start = 0 if after is None else bisect_right(keys, Key.parse(after))
        page = keys[start : start + limit]
        listed = [(key, found) for key in page if (found := self._found(key))]
        return ScanPage(listed, page[-1].text if start + limit < len(keys) else None)

    async def usage(self) -> Usage:
        self._check("usage")
        return Usage(self._nbytes, len(self._values), self.config.size)

    async def delete_exact(self, key: Key, etag: str, /) -> bool:
        self._check("delete_exact")
        value = self._value(key)
        return value is not None and value.etag == etag and self._forget(key)

    def _check(self, operation: str, batch: Sequence[Any] = ()) -> None:
        if self._closed:
            raise Closed("memory backend is closed", operation=operation)
        self.screen_batch(operation, batch)

    def _value(self, key: Key) -> _Value | None:
        value = self._values.get(key)
        if value and value.expires is not None and value.expires <= self.context.clock.now():
            self._drop(key)
            return None
        return value

    def _found(self, key: Key) -> Found | None:
        value = self._value(key)
        return Found(len(value.content), value.etag, value.expires) if value else None

    def _load(self, load: Load) -> Loaded:
        if refusal := self.screen_load(load):
            return refusal
        value = self._value(load.key)
        if value is None:
            return MISSED
        return fill(load, memoryview(value.content), ops.copy)

    def _store(self, store: Store) -> Stored:
        if refusal := self.screen_store(store):
            return refusal
        if self._value(store.key):
            return PRESENT
        if self._nbytes + store.nbytes > self.config.size:
            return Stored.refused(f"full: {self.config.size} bytes")
        self._stores += 1
        expires = None if store.ttl is None else self.context.clock.now() + store.ttl
        self._nbytes += store.nbytes
        self._values[store.key] = _Value(b"".join(store.parts), str(self._stores), expires)
        return STORED

    def _forget(self, key: Key) -> bool:
        return self._value(key) is not None and self._drop(key)

    def _drop(self, key: Key) -> bool:
        self._nbytes -= len(self._values.pop(key).content)
        return True


def _each(
    step: Callable[[Any], R], batch: Sequence[Any], done: Callable[[int, R], None] | None
) -> list[R]:
    results = []
    for index, item in enumerate(batch):
        results.append(step(item))
        if done is not None:
            done(index, results[-1])
    return results
