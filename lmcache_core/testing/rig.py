"""An open backend with single verbs on it, for a plugin's own tests: what the kit's laws do not know of its server."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from lmcache_core.spi import (
    AbstractBackend,
    Found,
    Key,
    Load,
    Loaded,
    LoadStatus,
    Store,
    Stored,
    StoreStatus,
)

SPACE = hashlib.sha256(b"space").digest()
NBYTES = 5000


def noise(number: int, nbytes: int = NBYTES, /) -> bytes:
    """A value of its own for each number."""
    return hashlib.shake_128(b"%d" % number).digest(nbytes)


class Rig:
    """Single verbs on numbered keys.

    Args:
        value: the bytes that belong to a number and a length.
        group: of the keys.
    """

    def __init__(
        self, backend: Any, /, *, value: Callable[[int, int], bytes] = noise, group: int = 0
    ) -> None:
        self.backend = backend
        self._value, self._group = value, group

    def key(self, number: int, /) -> Key:
        return Key(SPACE, hashlib.sha256(b"%d" % number).digest(), self._group)

    def value(self, number: int, nbytes: int = NBYTES, /) -> bytes:
        return self._value(number, nbytes)

    async def put(self, number: int, nbytes: int = NBYTES, ttl: float | None = None) -> Stored:
        item = Store(self.key(number), (memoryview(self.value(number, nbytes)),), ttl)
        (stored,) = await self.backend.store([item])
        return stored  # type: ignore[no-any-return]

    async def keep(self, *numbers: int, nbytes: int = NBYTES) -> None:
        """``put`` each, which must be stored."""
        for number in numbers:
            stored = await self.put(number, nbytes)
            assert stored.status is StoreStatus.STORED, stored

    async def get(self, number: int, nbytes: int = NBYTES, **more: Any) -> tuple[Loaded, bytes]:
        """The result, and the buffer as the load has left it."""
        buffer = bytearray(len(self.value(number, nbytes)))
        load = Load(self.key(number), (memoryview(buffer),))
        (loaded,) = await self.backend.load([load], **more)
        return loaded, bytes(buffer)

    async def has(self, *numbers: int, nbytes: int = NBYTES) -> bool:
        """Whether all of these load, byte for byte."""
        for number in numbers:
            loaded, buffer = await self.get(number, nbytes)
            if loaded.status is not LoadStatus.FILLED or buffer != self.value(number, nbytes):
                return False
        return True

    async def lookup(self, *numbers: int) -> list[Found | None]:
        return list(await self.backend.lookup([self.key(number) for number in numbers]))

    async def listing(self, limit: int = 10) -> tuple[list[Key], list[str]]:
        """Everything the backend lists: keys, and the names of what is foreign."""
        keys: list[Key] = []
        foreign: list[str] = []
        after = None
        while True:
            page = await self.backend.scan(after, limit=limit)
            assert len(page.values) <= limit
            keys += [one for one, _ in page.values]
            foreign += page.foreign
            if (after := page.after) is None:
                return keys, foreign


@asynccontextmanager
async def opened(backend: AbstractBackend, /, **how: Any) -> AsyncIterator[Rig]:
    """A rig on a backend that is closed in the end, also when it did not open; ``how`` is the rig's."""
    try:
        await backend.open()
        yield Rig(backend, **how)
    finally:
        await backend.aclose()


async def eventually(condition: Callable[[], Awaitable[Any]], seconds: float = 15.0) -> None:
    """Await a condition of the outside world."""
    end = asyncio.get_running_loop().time() + seconds
    while not await condition():
        assert asyncio.get_running_loop().time() < end, "it did not come about"
        await asyncio.sleep(0.02)
