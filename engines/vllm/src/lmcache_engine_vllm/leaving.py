"""Chunks that the cache has no more, for routers that follow vLLM's events."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from lmcache_core.spi import BackendError, ConfigError, Key
from lmcache_core.wire import records, replies
from lmcache_core.wire.client import DaemonClient
from lmcache_core.wire.codec import to_keys

PERIOD = 0.5
"""Seconds between two questions to the daemon."""


class Leaving:
    """Follows the daemon's changes on a thread of its own, from the first ``taken`` on.

    Args:
        space: tells the digest of the engine's key space, empty while it is not known.
    """

    def __init__(self, client: DaemonClient, space: Callable[[], bytes]) -> None:
        self._client = client
        self._space = space
        self._boot: bytes | None = None
        self._next: int | None = None
        self._gone: list[bytes] = []
        self._lost = False
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def taken(self) -> tuple[list[bytes], bool]:
        """Digests of chunks that are nowhere any more, and whether so much was missed that all may be."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lmcache-leaving", daemon=True)
            self._thread.start()
        with self._lock:
            found = self._gone, self._lost
            self._gone, self._lost = [], False
        return found

    def close(self) -> None:
        """Stop following."""
        self._over.set()

    def follow(self) -> None:
        """Ask once."""
        space, home = self._space(), self._client.home
        if not space or home is None:
            return
        if self._boot not in (None, home.boot):  # the memory of the daemon before is gone
            self._next = None
            with self._lock:
                self._lost = True
        self._boot = home.boot
        asked = self._next
        try:
            said = self._client.ask(replies.Changed, partial(records.Follow, since=asked))
        except (BackendError, ConfigError):
            return  # asked again in a moment; a daemon that does not know the question has nothing to tell
        self._next = said.next
        left = dict.fromkeys(
            key
            for change in said.changes
            if not change.there
            for key in to_keys(change.runs)
            if key.space == space
        )
        # What left memory may still be below it, or back by now.
        gone = self._nowhere([*left])
        with self._lock:
            self._lost |= said.lost or any(not c.there and not c.runs for c in said.changes)
            self._gone += [key.digest for key in gone]

    def _nowhere(self, keys: list[Key]) -> list[Key]:
        if not keys:
            return []
        places = self._client.lookup(keys).places
        return [key for key, place in zip(keys, places, strict=True) if place is None]

    def _run(self) -> None:
        while not self._over.wait(PERIOD):
            self.follow()
