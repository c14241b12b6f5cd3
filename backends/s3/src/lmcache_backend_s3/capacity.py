"""What is not sent because it would not be kept: a limit of ours, and a server that has no room."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http import HTTPStatus

from lmcache_backend_s3.bucket import FULL, Refused
from lmcache_core.spi import BackendError, Context

RECOUNT_S = 600.0
"""Others write and rules delete meanwhile; between two counts only the own stores are known."""
PAUSE_S = 2.0
"""Between two stores that try whether a full server has room again."""


def lacks_room(refused: Refused, /) -> bool:
    """Whether an answer to a put may mean that the server is full. SeaweedFS has no other word for it than 500."""
    return refused.code in FULL or refused.status in (
        HTTPStatus.INSUFFICIENT_STORAGE,
        HTTPStatus.INTERNAL_SERVER_ERROR,
    )


class Room:
    """Whether the server has any. While it has none, one store in ``PAUSE_S`` is sent; the others are refused here.

    A server that says so is believed at once. A 500 may pass, so only the second without a success between counts.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._doubted = False
        self._why = ""
        self._until = 0.0

    def refusal(self) -> str:
        """Why a store is not sent now; empty where it is."""
        with self._lock:
            if self._why and self._now() >= self._until:
                self._until = self._now() + PAUSE_S
                return ""
            return self._why

    def kept(self) -> None:
        """Note a store that ended well."""
        self._doubted, self._why = False, ""

    def declined(self, refused: Refused, /) -> str:
        """Note one that did not; the reason, where that was want of room."""
        if not lacks_room(refused):
            return ""
        with self._lock:
            if not self._doubted and refused.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                self._doubted = True
                return ""
            self._why, self._until = f"full: {refused}", self._now() + PAUSE_S
            return self._why


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
