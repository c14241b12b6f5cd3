"""Real time, as a plugin gets it from its context."""

from __future__ import annotations

import asyncio
import time


class SystemClock:
    """``lmcache_core.spi.Clock`` on the machine's own clocks."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float, /) -> None:
        await asyncio.sleep(seconds)
