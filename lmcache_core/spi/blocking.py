"""Adapter for clients whose calls block: one thread per item, memory quiescent under cancellation."""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from lmcache_core.spi.adapter import BackendAdapter, Done, attempt, failed
from lmcache_core.spi.backend import Found, Load, Loaded, Store, Stored
from lmcache_core.spi.context import Context
from lmcache_core.spi.errors import BackendError, Unavailable
from lmcache_core.spi.keys import Key

R = TypeVar("R")


class _Answers:
    """Results of a batch whose threads do several items each and tell of every one as it ends.

    Attributes:
        results: by position.
        wanted: positions and items that remain once the others were screened out.
    """

    def __init__(self, screen: Callable[[Any], Any], batch: Sequence[Any], done: Done, /) -> None:
        self.results: list[Any] = [None] * len(batch)
        self.wanted: list[tuple[int, Any]] = []
        self._done, self._loop = done, asyncio.get_running_loop()
        for at, item in enumerate(batch):
            if (screened := screen(item)) is None:
                self.wanted.append((at, item))
            else:
                self.settle(at, screened)

    def settle(self, at: int, result: Any, /) -> None:
        """On the loop."""
        self.results[at] = result
        if self._done is not None:
            self._done(at, result)

    def tell(self, at: int, result: Any, /) -> None:
        """From any thread."""
        if self._done is None:
            self.results[at] = result  # nobody waits for it: the loop sleeps until all are there
        else:
            self._loop.call_soon_threadsafe(self.settle, at, result)


class BlockingBackend(BackendAdapter):
    """Base for backends on a blocking client; subclasses write the ``*_blocking`` methods.

    They run on threads of ``context.executor``, several at a time, and must be thread-safe. What
    ``capabilities`` does not declare never reaches them.
    ``OSError`` becomes ``Unavailable``; a ``BackendError`` passes through; per item for load and store.
    """

    def __init__(self, config: Any, context: Context, /) -> None:
        super().__init__(config, context)
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
        await self._quiescent("open", self.open_blocking)

    async def lookup(
        self, keys: Sequence[Key], /, *, deadline: float | None = None
    ) -> Sequence[Found | None]:
        self.check_open("lookup")
        return await self._result("lookup", self.lookup_blocking, keys) if keys else []

    async def delete(self, keys: Sequence[Key], /) -> int:
        self.check_open("delete")
        return await self._result("delete", self.delete_blocking, keys) if keys else 0

    async def call(self, operation: str, function: Callable[..., R], /, *args: Any) -> R:
        """Run one blocking function like a load; for the optional verbs of a subclass."""
        self.check_open(operation)
        return await self._quiescent(operation, function, *args)

    async def _release(self) -> None:
        await self._quiescent("close", self.close_blocking)

    def _interrupt(self) -> None:
        # Through the loop, so that an exception in it is logged there and cannot end a wait early (B5).
        asyncio.get_running_loop().call_soon(self.interrupt_blocking)

    def _submit(
        self, operation: str, function: Callable[..., R], /, *args: Any
    ) -> asyncio.Future[R]:
        try:
            thread = self.context.executor.submit(attempt, operation, function, *args)
            future = asyncio.wrap_future(thread)
        except RuntimeError as error:
            # No thread could be started. Others of this batch may run already, so this is not raised here.
            future = asyncio.get_running_loop().create_future()
            future.set_exception(Unavailable(f"no thread: {error}", operation=operation))
        self._running.add(future)
        self._idle.clear()
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self._running.discard(future)
        if not self._running:
            self._idle.set()
        if not future.cancelled():
            future.exception()  # whoever waited may be gone; nobody has to be told

    async def _result(self, operation: str, function: Callable[..., R], /, *args: Any) -> R:
        """Run a call that borrows no memory: a cancelled caller leaves at once, the thread ends by itself."""
        future = self._submit(operation, function, *args)
        await asyncio.wait([future])
        return future.result()

    async def _quiescent(self, operation: str, function: Callable[..., R], /, *args: Any) -> R:
        future = self._submit(operation, function, *args)
        await self._settle([future], threading.Event())
        return future.result()

    async def _batch(self, operation: str, batch: Sequence[Any], done: Done, /) -> list[Any]:
        abandoned = threading.Event()
        screen = getattr(self, f"screen_{operation}")
        function = getattr(self, f"{operation}_blocking")

        def run(item: Any) -> Any:
            # An item that no thread has begun when the caller leaves must not begin afterwards.
            if abandoned.is_set():
                raise Unavailable("cancelled before it began", operation=operation)
            return screen(item) or function(item)

        def outcome(future: asyncio.Future[Any]) -> Any:
            error = future.exception()
            return failed(operation, error) if isinstance(error, BackendError) else future.result()

        def completed(index: int, future: asyncio.Future[Any]) -> None:
            if done is not None:
                done(index, outcome(future))

        futures = [self._submit(operation, run, item) for item in batch]
        for index, future in enumerate(futures):
            future.add_done_callback(partial(completed, index))
        await self._settle(futures, abandoned)
        return [outcome(future) for future in futures]

    def _answers(self, operation: str, batch: Sequence[Any], done: Done, /) -> _Answers:
        """For a ``_batch`` that does several items on one thread."""
        return _Answers(getattr(self, f"screen_{operation}"), batch, done)

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
