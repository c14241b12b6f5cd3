"""What operators do in a history: delete, clear, invalidate, freeze, resize, swap tiers, copy, list."""

from __future__ import annotations

import asyncio
import random
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lmcache_core.spi import BackendError, Key
from lmcache_core.storage.manager import StorageManager
from lmcache_core.testing.places import World
from lmcache_core.testing.simulation import SimLoop, sim_loop
from lmcache_core.testing.worlds import PAGE, TAGS


class Operators(World):
    """A world with a manager in it that is operated while others use it.

    Attributes:
        left: operations that clients still have to do.
        reasons: how often what happened.
        spare: tiers that were taken out.
        resizing: tiers that may be over a new limit.
    """

    def __init__(self, operations: int, reasons: Counter[str], kinds: Sequence[str]) -> None:
        self.loop: SimLoop = sim_loop()
        super().__init__(random.Random(self.loop.random.getrandbits(64)), kinds)
        self.left = operations
        self.reasons = reasons
        self.spare: list[str] = []
        self.resizing: set[str] = set()
        self.manager: StorageManager

    @abstractmethod
    def note(self, *what: object) -> None:
        """Something has happened."""

    @abstractmethod
    def keys(self) -> list[Key]:
        """Of some prefix."""

    def deadline(self) -> float | None:
        seconds = self.source.choice((None, 0.0, 0.01, 0.3, 2.0))
        return None if seconds is None else self.loop.time() + seconds

    async def operator(self) -> None:
        verbs = [
            self.delete, self.delete, self.invalidate, self.clear, self.flush, self.freeze,
            self.resize, self.swap, self.copy, self.listing,
        ]  # fmt: skip
        while self.left > 0:
            await asyncio.sleep(self.source.uniform(0, 2))
            verb = self.source.choice(verbs)
            self.reasons[f"operator {verb.__name__}"] += 1
            try:
                await verb()
            except BackendError:
                self.reasons[f"operator {verb.__name__} incomplete"] += 1
            self.note("operator", verb.__name__)

    async def delete(self) -> None:
        await self.manager.delete(self.keys(), deadline=self.deadline())

    async def invalidate(self) -> None:
        await self.manager.invalidate(self.source.choice(TAGS), deadline=self.deadline())

    async def clear(self) -> None:
        digit = self.source.randrange(4)
        wanted: Any = lambda key: key.digest[0] % 4 == digit  # noqa: E731
        await self.manager.clear(wanted, deadline=self.deadline())

    async def flush(self) -> None:
        deadline = self.deadline()
        await self.manager.flush(deadline=deadline or self.loop.time() + 5)

    async def freeze(self) -> None:
        self.manager.freeze()
        await asyncio.sleep(self.source.uniform(0, 1))
        self.manager.unfreeze()

    async def resize(self) -> None:
        local = [tier for tier in self.manager.tiers if tier.holdings is not None]
        if local:
            tier = self.source.choice(local)
            self.resizing.add(tier.name)
            await self.manager.set_limit(tier.name, self.source.choice((6, 12, 40)) * 3 * PAGE)

    async def swap(self) -> None:
        """Take a tier out, or put one in that was out (with what it kept)."""
        if self.spare and self.source.random() < 0.7:
            name = self.spare.pop()
            await self.manager.add_tier(self.make_tier(name), position=self.source.randrange(2))
        elif len(self.manager.tiers) > 1:
            tier = self.source.choice(self.manager.tiers)
            left = await self.manager.remove_tier(tier.name, deadline=self.loop.time() + 3)
            if not left.errors:
                self.spare.append(tier.name)

    async def copy(self) -> None:
        if len(self.manager.tiers) > 1:
            one, two = self.source.sample([tier.name for tier in self.manager.tiers], 2)
            verb = self.source.choice((self.manager.copy, self.manager.move))
            await verb(self.keys(), one, two, deadline=self.loop.time() + 2)

    async def listing(self) -> None:
        for name in ("cpu", *(tier.name for tier in self.manager.tiers)):
            after: str | None = None
            while True:
                page = await self.manager.list(name, after=after, limit=7)
                after = page.after
                if after is None:
                    break
