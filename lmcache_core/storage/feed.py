"""What came and went in memory and in local tiers, in order, for routers that follow a node's contents."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

from lmcache_core.spi import Key


class Change(NamedTuple):
    """A value became visible in a tier (``there``) or left it; no key: everything left it."""

    tier: str
    there: bool
    key: Key | None


class Feed:
    """The last changes, numbered from 0; called from any thread, under the lock of what changed.

    Following them from any state of the contents that is not older than the number it was taken at gives the
    present contents: an arrival or a departure that is told twice changes nothing. Shared tiers are not told:
    others change them too. What has expired counts as there until somebody asks for it.

    Args:
        size: changes kept; a reader who falls further behind is told so and lists the contents anew.
    """

    def __init__(self, size: int = 1 << 14) -> None:
        self._changes: deque[Change] = deque(maxlen=size)
        self._next = 0
        self._lock = Lock()

    @property
    def next(self) -> int:
        """Number of the change that comes next."""
        return self._next

    def watch(self, tier: str, /) -> Callable[[Key, bool], None]:
        """What an index of this tier calls."""

        def watch(key: Key, there: bool, /) -> None:
            self._add(Change(tier, there, key))

        return watch

    def emptied(self, tier: str, /) -> None:
        """A tier serves no more."""
        self._add(Change(tier, False, None))

    def since(self, number: int, limit: int, /) -> list[Change] | None:
        """Up to ``limit`` changes from ``number`` on; None when some of them are not kept any more."""
        with self._lock:
            first = self._next - len(self._changes)
            if not first <= number <= self._next:
                return None
            start = number - first
            return [
                self._changes[at] for at in range(start, min(start + limit, len(self._changes)))
            ]

    def _add(self, change: Change) -> None:
        with self._lock:
            self._changes.append(change)
            self._next += 1
