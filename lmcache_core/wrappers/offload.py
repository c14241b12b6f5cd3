"""Byte work of wrappers on the tier's threads, so that no slice of the event loop is long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from lmcache_core.spi import BackendError, Context

R = TypeVar("R")
INLINE_NBYTES = 128 << 10
"""Less is done on the event loop: a thread costs more."""


class Offload:
    """Work under way for one call of a verb.

    ``async with`` waits for all of it at the end, cancelled or not: buffers are borrowed until then (law B5).
    """

    def __init__(self, context: Context, /) -> None:
        self._executor = context.executor
        self._running: set[asyncio.Future[Any]] = set()

    def begin(
        self,
        nbytes: int,
        work: Callable[[], R],
        deliver: Callable[[R], None],
        failed: Callable[[BackendError], None],
    ) -> None:
        """Run ``work`` on so many bytes; then, on the loop, ``deliver`` its result or tell that it ``failed``."""
        if nbytes < INLINE_NBYTES:
            try:
                result = work()
            except BackendError as error:
                failed(error)
            else:
                deliver(result)
            return

        def ended(future: asyncio.Future[R]) -> None:
            self._running.discard(future)
            error = None if future.cancelled() else future.exception()
            if isinstance(error, BackendError):
                failed(error)
            elif error is not None:
                failed(BackendError(f"unexpected {error!r}"))
            elif not future.cancelled():
                deliver(future.result())

        future = asyncio.wrap_future(self._executor.submit(work))
        self._running.add(future)
        future.add_done_callback(ended)

    async def __aenter__(self) -> Offload:
        return self

    async def __aexit__(self, *_: object) -> None:
        cancelled = False
        while self._running:
            gate = asyncio.get_running_loop().create_future()
            for future in self._running:
                future.add_done_callback(lambda _, gate=gate: gate.done() or gate.set_result(None))  # type: ignore[misc]
            try:
                await gate
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError
