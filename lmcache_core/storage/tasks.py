"""Background tasks that have an owner: none is started and forgotten."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from lmcache_core.spi import LMCacheError

T = TypeVar("T")


class Tasks:
    """The running tasks of one named owner.

    A task that fails is logged with its name; it never takes others with it. Errors of a store belong
    to whoever waits for the call and are told there.
    """

    def __init__(self, owner: str, log: logging.Logger, /) -> None:
        self.owner = owner
        self._log = log
        self._running: dict[asyncio.Task[Any], None] = {}

    def __len__(self) -> int:
        return len(self._running)

    def start(self, what: str, work: Coroutine[Any, Any, T], /) -> asyncio.Task[T]:
        """Run ``work`` until it ends or ``stop`` cancels it."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self.owner}: {what}")
        self._running[task] = None
        task.add_done_callback(self._ended)
        return task

    async def stop(self, seconds: float, /) -> list[str]:
        """Cancel all, wait at most so long, and name those that still run (they stay owned)."""
        current = asyncio.current_task()
        waiting = [task for task in self._running if task is not current]
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting, timeout=max(0.0, seconds))
        return [task.get_name() for task in self._running if task is not current]

    def abandon(self) -> None:
        """Take what still runs off the loop's list: a call that hangs in the kernel would hold ``asyncio.run``."""
        for task in self._running:
            asyncio._unregister_task(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._running[task]
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, LMCacheError):
            self._log.error("%s failed: %s", task.get_name(), error, exc_info=error)


async def settle(task: asyncio.Task[Any] | asyncio.Future[Any], seconds: float | None, /) -> bool:
    """Wait for the end of ``task`` without cancelling it; False when the time is over first."""
    if not task.done():
        await asyncio.wait([task], timeout=None if seconds is None else max(0.0, seconds))
    return task.done()
