"""Adapter for transports that post a transfer and are polled for its end."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from lmcache_core.spi.backend import (
    AbstractBackend,
    Load,
    LoadDone,
    Loaded,
    Store,
    Stored,
    StoreDone,
)
from lmcache_core.spi.context import Context
from lmcache_core.spi.errors import BackendError, Closed, Unavailable

Handle = Any
R = TypeVar("R", Loaded, Stored)


class PolledBackend(AbstractBackend):
    """Base for post/check transports; subclasses write ``post_*``, ``check_*``, ``abort`` and the rest.

    ``post_load``/``post_store`` start a transfer without blocking and return a handle, or a finished result.
    ``check_*`` return the result once the transport touches the memory no more, else None. An exception of any
    of them says the same: the memory is not, or no longer, touched. ``OSError`` becomes ``Unavailable``.
    """

    poll_s: ClassVar[float] = 0.0002
    """First pause between two checks; doubles up to ``poll_max_s``."""
    poll_max_s: ClassVar[float] = 0.002

    def __init__(self, config: Any, context: Context, /) -> None:
        self.config = config
        self.context = context
        self._closed = False
        self._released = False
        self._closing = asyncio.Lock()
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @abstractmethod
    def post_load(self, load: Load, /) -> Handle | Loaded: ...

    @abstractmethod
    def post_store(self, store: Store, /) -> Handle | Stored: ...

    @abstractmethod
    def check_load(self, handle: Handle, /) -> Loaded | None: ...

    @abstractmethod
    def check_store(self, handle: Handle, /) -> Stored | None: ...

    def abort(self, handle: Handle, /) -> None:
        """Ask the transport to end a transfer early; it is still checked until it has. Default: wait for it."""

    async def close_transport(self) -> None:
        """Disconnect; called once, when nothing is in flight. Default: nothing to do."""

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
                    cancelled = (
                        True  # B10: nobody calls again, so leave only when everything is released
                    )
            await self.close_transport()
            if cancelled:
                raise asyncio.CancelledError

    async def load(
        self,
        batch: Sequence[Load],
        /,
        *,
        done: LoadDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Loaded]:
        def post(load: Load) -> Any:
            return self.screen_load(load) or self.post_load(load)

        return await self._drive("load", post, self.check_load, batch, Loaded.failed, done)

    async def store(
        self,
        batch: Sequence[Store],
        /,
        *,
        done: StoreDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Stored]:
        def post(store: Store) -> Any:
            return self.screen_store(store) or self.post_store(store)

        return await self._drive("store", post, self.check_store, batch, Stored.failed, done)

    def check_open(self, operation: str, batch: Sequence[Any] = (), /) -> None:
        """Raise ``Closed`` after ``aclose``, ``Unsupported`` for more items than ``max_batch``."""
        if self._closed:
            raise Closed(f"{type(self).__name__} is closed", operation=operation)
        self.screen_batch(operation, batch)

    async def _drive(
        self,
        operation: str,
        post: Callable[[Any], Any],
        check: Callable[[Handle], R | None],
        batch: Sequence[Any],
        failed: Callable[[BackendError], R],
        done: Callable[[int, R], None] | None,
    ) -> Sequence[R]:
        self.check_open(operation, batch)
        results: list[R | None] = [None] * len(batch)
        handles: dict[int, Handle] = {}

        def attempt(step: Callable[[Any], Any], argument: Any) -> Any:
            try:
                return step(argument)
            except BackendError as error:
                return failed(error)
            except OSError as error:
                return failed(Unavailable(f"{operation} failed: {error}", operation=operation))

        def finish(index: int, result: R) -> None:
            results[index] = result
            if done is not None:
                done(index, result)

        self._active += 1
        self._idle.clear()
        try:
            for index, item in enumerate(batch):
                outcome = attempt(post, item)
                if isinstance(outcome, (Loaded, Stored)):
                    finish(index, outcome)  # type: ignore[arg-type]  # the verb decides which of the two
                else:
                    handles[index] = outcome
            pause = self.poll_s
            while handles:
                for index, handle in list(handles.items()):
                    outcome = attempt(check, handle)
                    if outcome is not None:
                        del handles[index]
                        finish(index, outcome)
                        pause = self.poll_s
                if handles:
                    await self.context.clock.sleep(pause)
                pause = min(pause * 2, self.poll_max_s)
        finally:
            await self._drain(list(handles.values()), check)
            self._active -= 1
            if not self._active:
                self._idle.set()
        return [result for result in results if result is not None]

    async def _drain(self, handles: list[Handle], check: Callable[[Handle], Any]) -> None:
        """B5: whatever ended the await, the transport may still write into borrowed memory; wait until not."""
        for handle in handles:
            asyncio.get_running_loop().call_soon(
                self.abort, handle
            )  # an exception in it is only logged
        while handles:
            with contextlib.suppress(asyncio.CancelledError):
                await self.context.clock.sleep(self.poll_s)
            handles = [handle for handle in handles if not _ended(check, handle)]


def _ended(check: Callable[[Handle], Any], handle: Handle) -> bool:
    try:
        return check(handle) is not None
    except Exception:  # noqa: BLE001  # plugin code: any exception means that the transfer has ended
        return True
