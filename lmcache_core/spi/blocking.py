"""Adapter for clients whose calls block: one thread per item, memory quiescent under cancellation."""

from __future__ import annotations

import asyncio
import threading
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

    They run on threads of ``context.executor``, several at a time, and must be thread-safe. What
    ``capabilities`` does not declare never reaches them.
    ``OSError`` becomes ``Unavailable``; a ``BackendError`` passes through; per item for load and store.
    """

    def __init__(self, config: Any, context: Context, /) -> None:
        self.config = config
        self.context = context
        self._closed = False
        self._released = False
        self._closing = asyncio.Lock()
        self._running: set[asyncio.Future[Any]] = set()

    def open_blocking(self) -> None:
        """Connect. Default: nothing to do."""

    def close_blocking(self) -> None:
        """Disconnect; called once, when no other call is running, also if opening failed. Default: nothing."""

    def interrupt_blocking(self) -> None:
        """Make running calls end soon, from another thread (close a socket). Default: they end by themselves.

        Called when a load or store is cancelled; other calls that run at that moment may fail by it.
        """

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
        self._closed = True
        async with self._closing:  # a second caller waits until it really is closed
            if self._released:
                return
            self._released = True
            cancelled = False
            while self._running:
                try:
                    await asyncio.wait(set(self._running))
                except asyncio.CancelledError:
                    # B10: nobody calls again, so leave only when everything is released.
                    cancelled = True
                    self._interrupt()
            await self._quiescent([self._submit("close", self.close_blocking)])
            if cancelled:
                raise asyncio.CancelledError

    async def lookup(
        self, keys: Sequence[Key], /, *, deadline: float | None = None
    ) -> Sequence[Found | None]:
        self.check_open("lookup")
        return await self._result("lookup", self.lookup_blocking, keys) if keys else []

    async def load(
        self,
        batch: Sequence[Load],
        /,
        *,
        done: LoadDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Loaded]:
        def run(load: Load) -> Loaded:
            return self.screen_load(load) or self.load_blocking(load)

        self.check_open("load", batch)
        return await self._each("load", run, batch, Loaded.failed, done)

    async def store(
        self,
        batch: Sequence[Store],
        /,
        *,
        done: StoreDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Stored]:
        def run(store: Store) -> Stored:
            return self.screen_store(store) or self.store_blocking(store)

        self.check_open("store", batch)
        return await self._each("store", run, batch, Stored.failed, done)

    async def delete(self, keys: Sequence[Key], /) -> int:
        self.check_open("delete")
        return await self._result("delete", self.delete_blocking, keys) if keys else 0

    async def call(self, operation: str, function: Callable[..., R], /, *args: Any) -> R:
        """Run one blocking function like a load; for the optional verbs of a subclass."""
        self.check_open(operation)
        return (await self._quiescent([self._submit(operation, function, *args)]))[0]

    def check_open(self, operation: str, batch: Sequence[Any] = (), /) -> None:
        """Raise ``Closed`` after ``aclose``, ``Unsupported`` for more items than ``max_batch``."""
        if self._closed:
            raise Closed(f"{type(self).__name__} is closed", operation=operation)
        self.screen_batch(operation, batch)

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

        try:
            future = asyncio.wrap_future(self.context.executor.submit(guarded))
        except RuntimeError as error:
            # No thread could be started. Others of this batch may run already, so this is not raised here.
            future = asyncio.get_running_loop().create_future()
            future.set_exception(Unavailable(f"no thread: {error}", operation=operation))
        self._running.add(future)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self._running.discard(future)
        if not future.cancelled():
            future.exception()  # whoever waited may be gone; nobody has to be told

    def _interrupt(self) -> None:
        # Through the loop, so that an exception in it is logged there and cannot end a wait early (B5).
        asyncio.get_running_loop().call_soon(self.interrupt_blocking)

    async def _result(self, operation: str, function: Callable[..., R], /, *args: Any) -> R:
        """Run a call that borrows no memory: a cancelled caller leaves at once, the thread ends by itself."""
        future = self._submit(operation, function, *args)
        await asyncio.wait([future])
        return future.result()

    async def _each(
        self,
        operation: str,
        function: Callable[[Any], R],
        batch: Sequence[Any],
        failed: Callable[[BackendError], R],
        done: Callable[[int, R], None] | None,
    ) -> Sequence[R]:
        abandoned = threading.Event()

        def run(item: Any) -> R:
            # An item that no thread has begun when the caller leaves must not begin afterwards.
            if abandoned.is_set():
                raise Unavailable("cancelled before it began", operation=operation)
            return function(item)

        def outcome(future: asyncio.Future[R]) -> R:
            error = future.exception()
            return failed(error) if isinstance(error, BackendError) else future.result()

        def completing(index: int) -> Callable[[asyncio.Future[R]], None]:
            def completed(future: asyncio.Future[R]) -> None:
                if done is not None:
                    done(index, outcome(future))

            return completed

        futures = [self._submit(operation, run, item) for item in batch]
        for index, future in enumerate(futures):
            future.add_done_callback(completing(index))
        await self._settle(futures, abandoned)
        return [outcome(future) for future in futures]

    async def _quiescent(self, futures: Sequence[asyncio.Future[R]]) -> list[R]:
        await self._settle(futures, threading.Event())
        return [future.result() for future in futures]

    async def _settle(
        self, futures: Sequence[asyncio.Future[Any]], abandoned: threading.Event
    ) -> None:
        """Wait for all threads; a cancellation is honoured only when none of them runs any more."""
        pending = set(futures)
        while pending:
            try:
                _, pending = await asyncio.wait(pending)
            except asyncio.CancelledError:
                if not abandoned.is_set():
                    abandoned.set()
                    self._interrupt()
        if abandoned.is_set():
            raise asyncio.CancelledError
