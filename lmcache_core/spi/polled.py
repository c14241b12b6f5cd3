"""Adapter for transports that post a transfer and are polled for its end."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from lmcache_core.spi.adapter import BackendAdapter, Done, attempt, failed
from lmcache_core.spi.backend import Load, Loaded, Store, Stored
from lmcache_core.spi.context import Context
from lmcache_core.spi.errors import BackendError

Handle = Any


class PolledBackend(BackendAdapter):
    """Base for post/check transports; subclasses write ``post_*``, ``check_*``, ``abort`` and the rest.

    ``post_load``/``post_store`` start a transfer without blocking and return a handle, or a finished result.
    ``check_*`` return the result once the transport touches the memory no more, else None. An exception of any
    of them says the same: the memory is not, or no longer, touched. ``OSError`` becomes ``Unavailable``.
    """

    poll_s: ClassVar[float] = 0.0002
    """First pause between two checks; doubles up to ``poll_max_s``."""
    poll_max_s: ClassVar[float] = 0.002

    def __init__(self, config: Any, context: Context, /) -> None:
        super().__init__(config, context)
        self._active = 0

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

    async def pause(self, seconds: float, /) -> None:
        """Wait before the next look. Who can tell when something has ended returns then, and saves the looks."""
        await self.context.clock.sleep(seconds)

    async def close_transport(self) -> None:
        """Disconnect; called once, when nothing is in flight. Default: nothing to do."""

    async def _release(self) -> None:
        await self.close_transport()

    async def _batch(self, operation: str, batch: Sequence[Any], done: Done, /) -> list[Any]:
        post, check = getattr(self, f"post_{operation}"), getattr(self, f"check_{operation}")
        screen = getattr(self, f"screen_{operation}")
        results: dict[int, Any] = {}
        handles: dict[int, Handle] = {}

        def step(function: Callable[[Any], Any], argument: Any) -> Any:
            try:
                return attempt(operation, function, argument)
            except BackendError as error:
                return failed(operation, error)

        def finish(index: int, result: Any) -> None:
            results[index] = result
            if done is not None:
                done(index, result)

        self._active += 1
        self._idle.clear()
        try:
            for index, item in enumerate(batch):
                outcome = screen(item) or step(post, item)
                if isinstance(outcome, (Loaded, Stored)):
                    finish(index, outcome)
                else:
                    handles[index] = outcome
            pause = self.poll_s
            while handles:
                for index, handle in list(handles.items()):
                    outcome = step(check, handle)
                    if outcome is not None:
                        del handles[index]
                        finish(index, outcome)
                        pause = self.poll_s
                if handles:
                    await self.pause(pause)
                pause = min(pause * 2, self.poll_max_s)
        finally:
            await self._drain(list(handles.values()), check)
            self._active -= 1
            if not self._active:
                self._idle.set()
        return [results[index] for index in range(len(batch))]

    async def _drain(self, handles: list[Handle], check: Callable[[Handle], Any]) -> None:
        """B5: whatever ended the await, the transport may still write into borrowed memory; wait until not."""
        for handle in handles:
            # Through the loop, where an exception in it is only logged.
            asyncio.get_running_loop().call_soon(self.abort, handle)
        while handles:
            with contextlib.suppress(asyncio.CancelledError):
                await self.pause(self.poll_s)
            handles = [handle for handle in handles if not _ended(check, handle)]


def _ended(check: Callable[[Handle], Any], handle: Handle) -> bool:
    try:
        return check(handle) is not None
    except Exception:  # noqa: BLE001  # plugin code: any exception means that the transfer has ended
        return True
