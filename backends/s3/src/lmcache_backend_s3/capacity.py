"""A limit on what the prefix of a bucket holds, kept by counting: the store itself has none."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lmcache_core.spi import BackendError, Context

RECOUNT_S = 600.0
"""Others write and rules delete meanwhile; between two counts only the own stores are known."""


class Capacity:
    """Bytes under the prefix as counted last, plus what was stored and minus what was deleted from here since.

    Args:
        count: lists everything; slow, so it runs on a thread of its own. Nothing is granted before the first.
    """

    def __init__(self, limit: int, count: Callable[[], int], context: Context) -> None:
        self.limit = limit
        self._count = count
        self._context = context
        self._lock = threading.Lock()
        self._used: int | None = None
        self._since = 0
        self._due = 0.0
        self._counting = False

    def take(self, nbytes: int, /) -> str:
        """Charge bytes; why not, where they do not fit."""
        self._recount()
        with self._lock:
            if self._used is None:
                return "max_capacity: what is there has not been counted yet"
            if self._used + nbytes > self.limit:
                return f"full: {self._used} of {self.limit} bytes (max_capacity)"
            self._add(nbytes)
        return ""

    def give(self, nbytes: int, /) -> None:
        """Take a charge back."""
        with self._lock:
            self._add(-nbytes)

    def _add(self, nbytes: int) -> None:
        self._since += nbytes
        if self._used is not None:
            self._used += nbytes

    def _recount(self) -> None:
        with self._lock:
            if self._counting or self._context.clock.now() < self._due:
                return
            self._counting, self._since = True, 0
        try:
            self._context.executor.submit(self._run)
        except RuntimeError:  # no thread now
            self._counting = False

    def _run(self) -> None:
        used: int | None = None
        try:
            used = self._count()
        except (BackendError, OSError) as error:
            self._context.log.warning("cannot count tier %s: %s", self._context.tier, error)
        with self._lock:
            if used is not None:
                # What was stored while the listing ran may be in it or not: counted twice rather than not.
                self._used = used + max(0, self._since)
            self._due = self._context.clock.now() + RECOUNT_S
            self._counting = False
