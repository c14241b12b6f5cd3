"""What the adapters for other ways to program a client share: screening of items, and closing once."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lmcache_core.spi.backend import (
    AbstractBackend,
    Load,
    LoadDone,
    Loaded,
    Store,
    Stored,
    StoreDone,
)  # fmt: skip
from lmcache_core.spi.context import Context
from lmcache_core.spi.errors import BackendError, BufferTooSmall, Closed, Corrupt, Unavailable

R = TypeVar("R")
Done = Callable[[int, Any], None] | None


class BackendAdapter(AbstractBackend):
    """Base of ``BlockingBackend`` and ``PolledBackend``; not for plugins."""

    def __init__(self, config: Any, context: Context, /) -> None:
        self.config = config
        self.context = context
        self._closed = False
        self._released = False
        self._closing = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()

    @abstractmethod
    async def _batch(self, operation: str, batch: Sequence[Any], done: Done, /) -> list[Any]:
        """Run every item that ``screen_load`` or ``screen_store`` lets pass; memory is quiescent at the end (B5)."""

    @abstractmethod
    async def _release(self) -> None:
        """Disconnect; nothing runs any more."""

    def _interrupt(self) -> None:
        """Make what is running end soon. Default: it ends by itself."""

    async def load(
        self, batch: Sequence[Load], /, *, done: LoadDone = None, deadline: float | None = None
    ) -> Sequence[Loaded]:
        self.check_open("load", batch)
        return await self._batch("load", batch, done)

    async def store(
        self, batch: Sequence[Store], /, *, done: StoreDone = None, deadline: float | None = None
    ) -> Sequence[Stored]:
        self.check_open("store", batch)
        return await self._batch("store", batch, done)

    async def aclose(self) -> None:
        self._closed = True
        async with self._closing:  # a second caller waits until it really is closed
            if self._released:
                return
            self._released = True
            cancelled = False
            while not self._idle.is_set():
                try:
                    await self._idle.wait()
                except asyncio.CancelledError:
                    # B10: nobody calls again, so leave only when everything is released.
                    cancelled = True
                    self._interrupt()
            await self._release()
            if cancelled:
                raise asyncio.CancelledError

    def check_open(self, operation: str, batch: Sequence[Any] = (), /) -> None:
        """Raise ``Closed`` after ``aclose``, ``Unsupported`` for more items than ``max_batch``."""
        if self._closed:
            raise Closed(f"{type(self).__name__} is closed", operation=operation)
        self.screen_batch(operation, batch)


def failed(operation: str, error: BackendError, /) -> Loaded | Stored:
    """The result of a load or store that failed."""
    return Loaded.failed(error) if operation == "load" else Stored.failed(error)


def attempt(operation: str, function: Callable[..., R], /, *args: Any) -> R:
    """Call code of a plugin; an ``OSError`` becomes ``Unavailable``."""
    try:
        return function(*args)
    except BackendError:
        raise
    except OSError as error:
        raise Unavailable(f"{operation} failed: {error}", operation=operation) from error


def fill(
    load: Load, value: memoryview, copy: Callable[[memoryview, memoryview], object], /
) -> Loaded:
    """Answer a load from a whole value that lies in memory.

    Args:
        copy: ``copy(into, piece)`` of equal lengths, such as ``ops.copy``.
    """
    end = value.nbytes if load.length is None else load.offset + load.length
    if not 0 <= load.offset <= end <= value.nbytes:
        asked = f"{load.offset}..{end}"
        return Loaded.failed(Corrupt(f"{load.key!r} has {value.nbytes} bytes, asked for {asked}"))
    if load.room < end - load.offset:
        needed = f"{end - load.offset} bytes, got {load.room}"
        return Loaded.failed(BufferTooSmall(f"{load.key!r} needs {needed}"))
    at = load.offset
    for view in load.into:
        piece = value[at : min(end, at + view.nbytes)]
        copy(view[: piece.nbytes], piece)
        at += piece.nbytes
    return Loaded.filled(end - load.offset)


def section(views: Sequence[memoryview], start: int, nbytes: int, /) -> tuple[memoryview, ...]:
    """Bytes ``[start, start + nbytes)`` of the concatenation of byte views, or as many as there are; no empty views."""
    found = []
    for view in views:
        piece = view[start : start + nbytes]
        start = max(0, start - view.nbytes)
        nbytes -= piece.nbytes
        if piece.nbytes:
            found.append(piece)
    return tuple(found)
