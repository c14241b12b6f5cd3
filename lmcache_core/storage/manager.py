"""Tiers in configuration order behind one set of verbs; the resident one is where every value is used.

A value is one *frame* everywhere: header room and payload, contiguous in one extent of the resident pool.
The writer reserves, fills the payload, seals the header and commits; from then on the value is visible and
the manager carries the very same bytes to lower tiers. A reader leases; what lies in lower tiers is read into
a fresh extent first, verified, and becomes visible like any other value.

The verbs that touch only resident memory are plain calls: thread-safe, no wait, no other thread involved.
Everything else is a coroutine of the one event loop the manager was opened on. Misses, refusals and
deadlines are values; a coroutine raises ``Closed`` after ``aclose`` and nothing else.

Deadlines are times of ``context.clock``; None stands for the deadlines of the tiers.
"""

from __future__ import annotations

from collections.abc import Iterator

from lmcache_core.observers import check_identities
from lmcache_core.storage.admin import OPEN_WAIT_S, Administration
from lmcache_core.storage.results import Shutdown
from lmcache_core.storage.tasks import Tasks, settle


class StorageManager(Administration):
    """Its beginning, its end, and what must hold between; the verbs are in the three parts below.

    ``resident`` holds the constructor and the plain calls, ``serving`` lookup and load, ``admin`` the rest.
    """

    async def open(self) -> None:
        """Open the tiers, in order, and start serving; a tier that does not answer is an ailing tier.

        Raises:
            ConfigError: a tier's configuration cannot work here. What was opened is closed again.
        """
        opening = [self._tasks.start("open", self._admit(tier)) for tier in self._given]
        self.tiers += self._given
        for task in opening:
            await settle(task, None)
        errors = [error for task in opening if (error := task.exception()) is not None]
        if errors:
            await self.aclose(deadline=self.context.clock.now() + OPEN_WAIT_S)
            raise errors[0]

    async def aclose(self, *, deadline: float | None = None) -> Shutdown:
        """Refuse new work, flush, close the tiers, and be back in time whatever they do. Idempotent."""
        if self._shutdown is not None:
            return self._shutdown
        now = self.context.clock.now
        until = now() + self.config.manager.close_timeout if deadline is None else deadline
        self.closed = True
        await self.writing.flush(self._left(now() + (until - now()) / 2))
        unwritten = self.writing.books.nbytes
        closing = {tier: self._tasks.start("close", tier.close(until)) for tier in self.tiers}
        errors: dict[str, str] = {}
        parked: dict[str, int] = {}
        parked.update(
            (tier.name, tier.quarantine.nbytes) for tier in self._removed if tier.quarantine.nbytes
        )
        for tier, task in closing.items():
            if not await settle(task, until - now() + 0.1):
                errors[tier.name] = "did not close in time"
            elif task.result()[1]:
                errors[tier.name] = task.result()[1]
            if tier.quarantine.nbytes:
                parked[tier.name] = tier.quarantine.nbytes
            self.writing.detach(tier)
        await self._tasks.stop(max(0.0, until - now()))
        for owner in self.tasks():
            owner.abandon()
        stock = self.pool.accounting()
        if not (stock.reserved or stock.quarantined or stock.leased):
            # Otherwise somebody may still touch the memory, and the mapping stays.
            self.pool.close()
            if self._resident is not None:
                await self._resident.aclose()
        self._shutdown = Shutdown(parked, unwritten, errors)
        return self._shutdown

    def check(self) -> None:
        """Assert the invariants of memory, limits and counters."""
        self.pool.check()
        for tier in self.tiers:
            if tier.holdings is not None and tier.complete.is_set():
                tier.holdings.check()
        self.writing.books.check()
        self.measure()
        broken = check_identities(self.metrics.snapshot())
        assert not broken, broken

    def tasks(self) -> Iterator[Tasks]:
        """Owners of all background tasks."""
        yield self._tasks
        yield from (tier.tasks for tier in (*self.tiers, *self._removed))
