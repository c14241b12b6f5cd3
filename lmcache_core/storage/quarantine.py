"""Calls nobody waits for any more, and the memory they may still touch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Quarantine:
    """Late calls of one tier. Memory comes back when its call has really ended, never by time.

    Args:
        limit: parked bytes above which the tier counts as hung.
        calls: late calls, with memory or without, above which it does.
        changed: told the parked bytes after each change.
    """

    def __init__(self, limit: int, calls: int, changed: Callable[[int], None], /) -> None:
        self.limit = limit
        self.calls = calls
        self.nbytes = 0
        self._late: dict[asyncio.Future[Any], int] = {}
        self._changed = changed

    def __len__(self) -> int:
        return len(self._late)

    @property
    def full(self) -> bool:
        """The tier hangs: asking it again would only park more."""
        return self.nbytes > self.limit or len(self._late) > self.calls

    def park(self, call: asyncio.Future[Any], nbytes: int, free: Callable[[], None], /) -> None:
        """Cancel a call and keep ``nbytes`` until it has ended; then ``free`` gives them back."""
        self._late[call] = nbytes
        self.nbytes += nbytes
        self._changed(self.nbytes)

        def ended(call: asyncio.Future[Any]) -> None:
            if not call.cancelled():
                call.exception()  # taken: whoever waited has long been told
            self.nbytes -= self._late.pop(call)
            free()
            self._changed(self.nbytes)

        call.add_done_callback(ended)
        call.cancel()
