"""Lives of one simulated process after another: when one is killed, nothing of it runs again.

What a life has begun (tasks, callbacks, timers) carries its number in the context that asyncio hands on. Nothing is
cancelled: a process that is killed tidies nothing up.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterable
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any

from lmcache_core.testing.simulation import SimLoop

LIFE: ContextVar[int] = ContextVar("life", default=0)
"""0: not of a process that is killed with all it has begun."""


def begin(number: int) -> Context:
    """What a new life runs in."""
    context = copy_context()
    context.run(LIFE.set, number)
    return context


def freeze(loop: SimLoop, number: int) -> None:
    """Drop all that this life was about to do; called from outside of it."""
    assert LIFE.get() != number
    for handle in [*loop._ready, *loop._scheduled]:  # type: ignore[attr-defined]
        if handle._context.get(LIFE) == number:
            handle.cancel()


def forget(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Frozen tasks are nobody's any more; whoever calls keeps them until ``bury``."""
    for task in tasks:
        asyncio.tasks._unregister_task(task)
        task._log_destroy_pending = False  # type: ignore[attr-defined]


def bury(loop: SimLoop, tasks: Iterable[asyncio.Task[Any]]) -> None:
    """When all is over: end every coroutine but the one that runs, whatever they say to it."""
    me, left = asyncio.current_task(), list(tasks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some have never begun
        while left:
            for task in left:
                with suppress(BaseException):
                    task.get_coro().close()
            left = [each for each in asyncio.all_tasks(loop) if each is not me]
            forget(left)
