"""Adapter for clients whose calls block: one thread per item, memory quiescent under cancellation."""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from lmcache_core.spi.adapter import BackendAdapter, Done, attempt, failed
from lmcache_core.spi.backend import Found, Load, Loaded, Store, Stored
from lmcache_core.spi.context import Context
from lmcache_core.spi.errors import BackendError, Unavailable
from lmcache_core.spi.keys import Key

R = TypeVar("R")


class _Answers:
    """Results of a batch on their way from threads to the loop, which is woken once for all that came meanwhile.

    Attributes:
        results: by position.
        wanted: positions and items that remain once the others were screened out.
        all: done when every item is settled.
    """

    def __init__(self, screen: Callable[[Any], Any], batch: Sequence[Any], done: Done, /) -> None:
        self.results: list[Any] = [None] * len(batch)
        self.wanted: list[tuple[int, Any]] = []
        self._done, self._loop = done, asyncio.get_running_loop()
        self._arrived: deque[tuple[int, Any]] = deque()
        self._woken = False
        self.all: asyncio.Future[None] = self._loop.create_future()
        self._open = len(batch)
        if not batch:
            self.all.set_result(None)
        for at, item in enumerate(batch):
            if (screened := screen(item)) is None:
                self.wanted.append((at, item))
            else:
                self.settle(at, screened)

    def settle(self, at: int, result: Any, /) -> None:
        """On the loop."""
        self.results[at] = result
        self._open -= 1
        if not self._open:
            self.all.set_result(None)
        if self._done is not None:
            self._done(at, result)

    def tell(self, at: int, result: Any, /) -> None:
        """From any thread, once per item."""
        self._arrived.append((at, result))
        told = self._done is not None or len(self._arrived) == self._open
        if told and not self._woken:  # else nobody waits for it before the others are there
            self._woken = True
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Settle what has arrived. On the loop."""
        self._woken = False  # first: what arrives from here on wakes the loop again
        try:
            while self._arrived:
                self.settle(*self._arrived.popleft())
        finally:  # an error of `done` is the loop's to report and costs no other item its result
            if self._arrived:
                self._loop.call_soon(self.drain)


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
        return self._runs(future)

    def _runs(self, future: asyncio.Future[R]) -> asyncio.Future[R]:
        """Not idle before this ends."""
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
        answers, abandoned = self._answers(operation, batch, done), threading.Event()
        function = getattr(self, f"{operation}_blocking")
        unexpected: list[BaseException] = []

        def run(item: Any) -> Any:
            # An item that no thread has begun when the caller leaves must not begin afterwards.
            if abandoned.is_set():
                raise Unavailable("cancelled before it began", operation=operation)
            return attempt(operation, function, item)

        def ended(at: int, future: Future[Any]) -> None:
            error = future.exception()
            if error is not None and not isinstance(error, BackendError):
                unexpected.append(error)
                error = BackendError(repr(error), operation=operation)
            answers.tell(at, future.result() if error is None else failed(operation, error))

        for at, item in answers.wanted:
            try:
                future = self.context.executor.submit(run, item)
            except RuntimeError as error:  # others run already, so this is not raised here
                none = Unavailable(f"no thread: {error}", operation=operation)
                answers.tell(at, failed(operation, none))
            else:
                # Not by `run`: what it borrowed is given back before anybody is told.
                future.add_done_callback(partial(ended, at))
        answers.wanted.clear()  # a thread's future leads here for a moment longer than the call lasts (B4)
        await self._settle([self._runs(answers.all)], abandoned)
        if unexpected:
            raise unexpected[0]
        return answers.results

    def _answers(self, operation: str, batch: Sequence[Any], done: Done, /) -> _Answers:
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
