"""Reading what nobody asks for, slowly, so that damage at rest is found before a request finds it."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from lmcache_core.spi import BackendError, Corrupt, Key, Load, LoadStatus
from lmcache_core.storage import upkeep

if TYPE_CHECKING:
    from lmcache_core.storage.tier import Tier

PAGE = 64
PAUSE_S = 60.0
"""Between two rounds, and after a store did not answer."""


async def scrub(tier: Tier, rate: int, /) -> None:
    """Verify every value of a local tier, round after round, ``rate`` bytes per second on average.

    Runs until it is cancelled. What is damaged is removed, as if a request had found it. The memory that
    values are read into belongs to this task, which ends only after the backend has let go of it.
    """
    holdings, clock = tier.holdings, tier.context.clock
    assert holdings is not None
    await tier.complete.wait()
    scrubber = _Scrubber(tier)
    while True:
        after: int | None = 0
        while after is not None:
            slots, after = holdings.index.page(after, PAGE)
            for key in [holdings.index.key(slot) for slot in slots]:
                begun = clock.now()
                try:
                    nbytes = await scrubber.verify(key)
                except BackendError as error:
                    tier.context.log.debug("tier %s: scrubbing waits: %s", tier.name, error)
                    await clock.sleep(PAUSE_S)
                else:
                    await clock.sleep(max(0.0, nbytes / rate - (clock.now() - begun)))
        tier.count("scrub_rounds_total")
        await clock.sleep(PAUSE_S)


class _Scrubber:
    def __init__(self, tier: Tier, /) -> None:
        self._tier = tier
        self._room = memoryview(mmap.mmap(-1, mmap.PAGESIZE))

    async def verify(self, key: Key, /) -> int:
        """Read a value through all wrappers; returns its bytes, 0 when it is gone.

        Raises:
            BackendError: nothing is known about it.
        """
        tier, holdings = self._tier, self._tier.holdings
        assert holdings is not None
        held = holdings.hold([key])
        try:
            (found,) = await tier.backend.lookup([key])
            if found is None:
                if held and holdings.index.slot_of(key) == held[0][1]:
                    upkeep.lose(tier, key)
                return 0
            if found.nbytes > len(self._room):
                self._room = memoryview(mmap.mmap(-1, found.nbytes))
            (loaded,) = await tier.backend.load([Load(key, (self._room[: found.nbytes],))])
        finally:
            holdings.release(held)
        if loaded.status is LoadStatus.FILLED:
            tier.count("scrubbed_chunks_total")
            tier.count("scrubbed_bytes_total", loaded.nbytes)
        elif loaded.status is LoadStatus.FAILED:
            assert loaded.error is not None
            if not isinstance(loaded.error, Corrupt):
                raise loaded.error
            if held and holdings.index.slot_of(key) == held[0][1]:
                upkeep.damaged(tier, key, loaded.error)
        return found.nbytes
