"""Adapter for clients whose calls block: one thread per item, memory quiescent under cancellation."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lmcache_core.spi.backend import (
    AbstractBackend,
    Found,
    Load,
    LoadDone,
    Loaded,
    Store,
    Stored,
    StoreDone,
)
from lmcache_core.spi.context import Context
from lmcache_core.spi.errors import BackendError, Closed, Unavailable
from lmcache_core.spi.keys import Key

R = TypeVar("R")


class BlockingBackend(AbstractBackend):
    """Base for backends on a blocking client; subclasses write the ``*_blocking`` methods.

    They run on threads of ``context.executor``, several at a time, and must be thread-safe.
    ``OSError`` becomes ``Unavailable``; a ``BackendError`` passes through; per item for load and store.
    """

    def __init__(self, config: Any, context: Context, /) -> None:
        self.config = config
        self.context = context
        self._closed = False
        self._running: set[asyncio.Future[Any]] = set()

    def open_blocking(self) -> None:
        """Connect. Default: nothing to do."""

    def close_blocking(self) -> None:
        """Disconnect; called once, when no other call is running. Default: nothing to do."""

    def interrupt_blocking(self) -> None:
        """Make running calls end soon, from another thread (close a socket). Default: they end by themselves."""

    @abstractmethod
    def lookup_blocking(self, keys: Sequence[Key], /) -> Sequence[Found | None]: ...

    @abstractmethod
    def load_blocking(self, load: Load, /) -> Loaded: ...

    @abstractmethod
    def store_blocking(self, store: Store, /) -> Stored: ...

    @abstractmethod
    def delete_blocking(self, keys: Sequence[Key], /) -> int: ...

    async def open(self) -> None:
        await self._quiescent([self._submit("open", self.open_blocking)])

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        while self._running:
            await asyncio.wait(set(self._running))
        try:
            await self._quiescent([self._submit("close", self.close_blocking)])
        finally:
            self._running.clear()

    async def lookup(
        self, keys: Sequence[Key], /, *, deadline: float | None = None
    ) -> Sequence[Found | None]:
        self._check_open("lookup")
        if not keys:
            return []
        return (await self._quiescent([self._submit("lookup", self.lookup_blocking, keys)]))[0]

    async def load(
        self,
        batch: Sequence[Load],
        /,
        *,
        done: LoadDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Loaded]:
        self._check_open("load")
        return await self._each("load", self.load_blocking, batch, Loaded.failed, done)

    async def store(
        self,
        batch: Sequence[Store],
        /,
        *,
        done: StoreDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Stored]:
        self._check_open("store")
        return await self._each("store", self.store_blocking, batch, Stored.failed, done)

    async def delete(self, keys: Sequence[Key], /) -> int:
        self._check_open("delete")
        if not keys:
            return 0
        return (await self._quiescent([self._submit("delete", self.delete_blocking, keys)]))[0]

    async def call(self, operation: str, function: Callable[..., R], /, *args: Any) -> R:
        """Run one blocking function under the same rules; for the optional verbs of a subclass."""
        self._check_open(operation)
        return (await self._quiescent([self._submit(operation, function, *args)]))[0]

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise Closed(f"{type(self).__name__} is closed", operation=operation)

    def _submit(
        self, operation: str, function: Callable[..., R], /, *args: Any
    ) -> asyncio.Future[R]:
        def guarded() -> R:
            try:
                return function(*args)
            except BackendError:
                raise
            except OSError as error:
                raise Unavailable(f"{operation} failed: {error}", operation=operation) from error

        future = asyncio.wrap_future(self.context.executor.submit(guarded))
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    async def _each(
        self,
        operation: str,
        function: Callable[[Any], R],
        batch: Sequence[Any],
        failed: Callable[[BackendError], R],
        done: Callable[[int, R], None] | None,
    ) -> Sequence[R]:
        abandoned = asyncio.Event()

        def run(item: Any) -> R:
            # An item that no thread has begun when the caller leaves must not begin afterwards.
            if abandoned.is_set():
                return failed(Unavailable("cancelled before it began", operation=operation))
            try:
                return function(item)
            except BackendError as error:
                return failed(error)
            except OSError as error:
                return failed(Unavailable(f"{operation} failed: {error}", operation=operation))

        def completing(index: int) -> Callable[[asyncio.Future[R]], None]:
            def completed(future: asyncio.Future[R]) -> None:
                if done is not None and not future.cancelled() and future.exception() is None:
                    done(index, future.result())

            return completed

        futures = [self._submit(operation, run, item) for item in batch]
        for index, future in enumerate(futures):
            future.add_done_callback(completing(index))
        return await self._quiescent(futures, abandoned)

    async def _quiescent(
        self, futures: Sequence[asyncio.Future[R]], abandoned: asyncio.Event | None = None
    ) -> list[R]:
        """Wait for all threads; a cancellation is honoured only when none of them runs any more."""
        if not futures:
            return []
        cancelled = False
        pending = set(futures)
        while pending:
            try:
                _, pending = await asyncio.wait(pending)
            except asyncio.CancelledError:
                if not cancelled:
                    cancelled = True
                    if abandoned is not None:
                        abandoned.set()
                    self.interrupt_blocking()
        if cancelled:
            raise asyncio.CancelledError
        return [future.result() for future in futures]
