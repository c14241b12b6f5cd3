"""Adapter for transports that post a transfer and are polled for its end."""

from __future__ import annotations

import asyncio
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
from lmcache_core.spi.errors import BackendError, Closed

Handle = Any
R = TypeVar("R", Loaded, Stored)


class PolledBackend(AbstractBackend):
    """Base for post/check transports; subclasses write ``post_*``, ``check_*``, ``abort`` and the rest.

    ``post_load``/``post_store`` start a transfer without blocking and return a handle, or a finished result.
    ``check`` returns the result once the transport touches the memory no more, else None.
    """

    poll_s: ClassVar[float] = 0.0002
    """First pause between two checks; doubles up to ``poll_max_s``."""
    poll_max_s: ClassVar[float] = 0.002

    def __init__(self, config: Any, context: Context, /) -> None:
        self.config = config
        self.context = context
        self._closed = False
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
        if self._closed:
            return
        self._closed = True
        await self._idle.wait()
        await self.close_transport()

    async def load(
        self,
        batch: Sequence[Load],
        /,
        *,
        done: LoadDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Loaded]:
        return await self._drive(
            "load", self.post_load, self.check_load, batch, Loaded.failed, done
        )

    async def store(
        self,
        batch: Sequence[Store],
        /,
        *,
        done: StoreDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Stored]:
        return await self._drive(
            "store", self.post_store, self.check_store, batch, Stored.failed, done
        )

    async def _drive(
        self,
        operation: str,
        post: Callable[[Any], Any],
        check: Callable[[Handle], R | None],
        batch: Sequence[Any],
        failed: Callable[[BackendError], R],
        done: Callable[[int, R], None] | None,
    ) -> Sequence[R]:
        if self._closed:
            raise Closed(f"{type(self).__name__} is closed", operation=operation)
        results: list[R | None] = [None] * len(batch)
        handles: dict[int, Handle] = {}

        def finish(index: int, result: R) -> None:
            results[index] = result
            if done is not None:
                done(index, result)

        def attempt(index: int, step: Callable[[Any], Any], argument: Any) -> Any:
            try:
                return step(argument)
            except BackendError as error:
                return failed(error)

        self._active += 1
        self._idle.clear()
        cancelled = False
        try:
            for index, item in enumerate(batch):
                outcome = attempt(index, post, item)
                if isinstance(outcome, (Loaded, Stored)):
                    finish(index, outcome)  # type: ignore[arg-type]  # the verb decides which of the two
                else:
                    handles[index] = outcome
            pause = self.poll_s
            while handles:
                for index, handle in list(handles.items()):
                    outcome = attempt(index, check, handle)
                    if outcome is not None:
                        del handles[index]
                        finish(index, outcome)
                        pause = self.poll_s
                if not handles:
                    break
                try:
                    await self.context.clock.sleep(pause)
                except asyncio.CancelledError:
                    # B5: the transport may still write into borrowed memory; leave only when it cannot.
                    if not cancelled:
                        cancelled = True
                        for handle in handles.values():
                            self.abort(handle)
                pause = min(pause * 2, self.poll_max_s)
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()
        if cancelled:
            raise asyncio.CancelledError
        return [result for result in results if result is not None]
