"""Values that operators keep in memory: leases of the daemon itself, bounded in bytes and in time.

They are this process's own leases, so a clock may end them: nobody else reads under them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from lmcache_core.memory.ledger import padded
from lmcache_core.spi import ConfigError, Key, Lease
from lmcache_core.storage.manager import StorageManager
from lmcache_server.slices import MANY

SHARE = 0.25
"""Most of memory that pinned values may take: the rest has to serve everybody."""
LONGEST = 7 * 24 * 3600.0
_PART = 64
"""Values brought up at once, which is all that may be over the share for a moment."""
_PAUSE_S = 1.0


class Pins:
    """See the module. ``nbytes`` counts padding, as memory does."""

    def __init__(self, manager: StorageManager, now: Callable[[], float]) -> None:
        self._manager = manager
        self._now = now
        self._held: dict[Key, tuple[Lease, float]] = {}
        self.nbytes = 0
        self._watching = False

    @property
    def limit(self) -> int:
        """Bytes that ``nbytes`` never exceeds."""
        return int(self._manager.pool.capacity * SHARE)

    def __len__(self) -> int:
        return len(self._held)

    def keys(self) -> list[Key]:
        return list(self._held)

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    async def pin(
        self, keys: Sequence[Key], lasts: float, /, *, deadline: float
    ) -> tuple[int, int]:
        """Keep values for so long from now on, bringing them up first; what is pinned already stays that long.

        Returns how many of them are pinned now, and the bytes of all pins.

        Raises:
            ConfigError: too long.
        """
        if lasts > LONGEST:
            raise ConfigError(
                f"a pin lasts at most {LONGEST:.0f} s, not {lasts:.0f}; pin again later"
            )
        self._sweep(keys)
        until = self._now() + lasts
        rest = [key for key in dict.fromkeys(keys) if key not in self._held]
        for key in keys:
            if key in self._held:
                self._held[key] = (self._held[key][0], until)
        found = await self._manager.lookup(rest, deadline=deadline)
        rest = [key for key, place in zip(rest, found.places, strict=True) if place is not None]
        while rest and self.nbytes < self.limit:
            loaded = await self._manager.load(rest[:_PART], self, deadline=deadline)
            for lease in loaded.leases:
                self._take(lease, until)
            rest = rest[max(1, len(loaded.leases)) :]  # one that did not come is passed over
        return sum(key in self._held for key in dict.fromkeys(keys)), self.nbytes

    def unpin(self, keys: Sequence[Key], /) -> int:
        """Keep these values no longer, or with no key none of them; counts what was pinned."""
        wanted = [key for key in keys or list(self._held) if key in self._held]
        for key in wanted:
            self._end(key)
        return len(wanted)

    def sweep(self) -> None:
        """End pins whose time is over, and those of values that were deleted meanwhile."""
        self._sweep(self.keys())

    async def tidy(self) -> None:
        """``sweep``, of thousands of pins some in each turn."""
        keys = self.keys()
        for at in range(0, len(keys), MANY):
            self._sweep(keys[at : at + MANY])
            await asyncio.sleep(0)

    async def watch(self) -> None:
        """Tidy up now and then until nothing is pinned."""
        if self._watching:
            return
        self._watching = True
        while self._held:
            await asyncio.sleep(_PAUSE_S)
            await self.tidy()
        self._watching = False

    def _sweep(self, keys: Sequence[Key]) -> None:
        now, keys = self._now(), [key for key in keys if key in self._held]
        for key, nbytes in zip(keys, self._manager.pool.lengths(keys), strict=True):
            if nbytes is None or self._held[key][1] <= now:
                self._end(key)

    def _take(self, lease: Lease, until: float) -> None:
        size = padded(lease.extent.nbytes)
        if lease.key in self._held or self.nbytes + size > self.limit:
            self._manager.release([lease])
            return
        self._held[lease.key] = (lease, until)
        self.nbytes += size

    def _end(self, key: Key) -> None:
        lease, _ = self._held.pop(key)
        self.nbytes -= padded(lease.extent.nbytes)
        self._manager.release([lease])
