"""What a shared tier said lately, so that it is not asked twice about one request."""

from __future__ import annotations

from collections import OrderedDict

from lmcache_core.spi import Found, Key


class Answers:
    """Bounded memory of lookup answers, hits and misses, oldest forgotten first.

    Args:
        limit: most keys.
        seconds: how long an answer counts; others may store or evict meanwhile.
    """

    def __init__(self, limit: int = 1 << 16, seconds: float = 5.0) -> None:
        self.limit = limit
        self.seconds = seconds
        self._said: OrderedDict[Key, tuple[Found | None, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._said)

    def get(self, key: Key, now: float, /) -> tuple[Found | None] | None:
        """The answer in a tuple of one, None when there is none that still counts."""
        said = self._said.get(key)
        if said is None:
            return None
        found, until = said
        if now >= until:
            del self._said[key]
            return None
        return (found,)

    def put(self, key: Key, found: Found | None, now: float, /) -> None:
        until = now + self.seconds
        if found is not None and found.expires is not None:
            until = min(until, found.expires)
        self._said[key] = (found, until)
        self._said.move_to_end(key)
        if len(self._said) > self.limit:
            self._said.popitem(last=False)

    def drop(self, key: Key, /) -> None:
        self._said.pop(key, None)

    def clear(self) -> None:
        self._said.clear()
