"""A manager against a model of it: what was flushed is found, what was deleted is not, in any order of calls."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from lmcache_core.config import Share
from lmcache_core.spi import Key, Unavailable
from lmcache_core.storage import Reason
from lmcache_core.testing.contexts import simulated_context
from lmcache_core.testing.simulation import SimLoop
from lmcache_core.testing.worlds import (
    PAGE,
    Lasting,
    key_of,
    make_manager,
    make_memory,
    make_tier,
    put,
    verify_lease,
)
from lmcache_core.wrappers import Chaos, ChaosOptions

KEYS = [key_of(number) for number in range(6)]
wishes = st.builds(lambda first, n: KEYS[first : first + n], st.integers(0, 5), st.integers(1, 4))


class ManagerMachine(RuleBasedStateMachine):
    """Memory for six values above a tier for all of them, which fails at times and outlives its managers.

    Attributes:
        fresh: stored since this manager began and the tier failed last, and not deleted since.
        safe: of those, what was flushed when that came as far as the tier; from then on nothing may lose it.
        there: stored at some time and not deleted since; may be found.
        owed: of what was deleted, what the tier may still have, as it was said.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = SimLoop(0)
        self.held: list[Sequence[Any]] = []
        self.fresh: set[Key] = set()
        self.safe: set[Key] = set()
        self.there: set[Key] = set()
        self.owed: set[Key] = set()

    @initialize(seed=st.integers(0, 1 << 16))
    def first(self, seed: int) -> None:
        self.context = simulated_context(tier="disk", random=random.Random(seed))
        self.kept = make_memory(self.context)
        kept = Lasting(self.context, self.kept, persistent=True)
        self.below = Chaos(ChaosOptions(fail=0.3, fail_item=0.5), self.context, kept)
        self.below.active = False
        self.begin()

    def begin(self) -> None:
        self.fresh.clear()
        tier = make_tier(backend=self.below, context=self.context)
        self.manager = make_manager(
            [tier], capacity=12 * PAGE, cost_gate=False, dirty_cap=Share(0.6)
        )
        self.do(self.manager.open())
        self.do(tier.complete.wait())

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 1000))

    @contextmanager
    def troubled(self, failing: bool) -> Iterator[None]:
        """Meanwhile calls and items fail now and then, before or after they had their effect."""
        if failing:
            self.fresh.clear()
        self.below.active = failing
        yield
        self.do(asyncio.sleep(1))
        self.below.active = False
        for batch in self.held:
            for lease in batch:
                verify_lease(lease)  # held memory is nobody else's
        self.manager.pool.check()
        self.manager.writing.books.check()

    def flush(self) -> None:
        left = self.do(self.manager.flush())
        assert left, f"{left} of a flush into a tier that works"
        written = self.fresh.intersection(self.kept._values)
        skipped = self.manager.metrics.snapshot().total(
            "lmcache_tier_write_back_skipped_total", reason="dirty cap"
        )
        assert len(self.fresh - written) <= skipped, "neither flushed nor counted"
        self.safe |= written

    @rule(keys=wishes, failing=st.booleans(), flush=st.booleans())
    def store(self, keys: list[Key], failing: bool, flush: bool) -> None:
        async def within() -> list[bool]:
            return put(self.manager, keys)

        with self.troubled(failing):
            stored = {k for k, done in zip(keys, self.do(within()), strict=True) if done}
            self.there |= stored
            self.owed -= stored
            self.fresh |= set() if failing else stored
        if flush:
            self.flush()

    @rule(keys=wishes, failing=st.booleans(), empty=st.booleans())
    def load(self, keys: list[Key], failing: bool, empty: bool) -> None:
        """From memory, or after memory has lost what it may lose."""
        if empty:
            self.flush()
            self.manager.pool.drop(KEYS)
        with self.troubled(failing):
            lookup = self.do(self.manager.lookup(keys))
            for key, place in zip(keys, lookup.places, strict=True):
                assert place is None or key in self.there, "found what was deleted"
                assert place is not None or key not in self.safe or lookup.unanswered, "lost"
            loaded = self.do(self.manager.load(keys, "reader"))
            count = len(loaded.leases)
            assert [lease.key for lease in loaded.leases] == keys[:count]
            assert (loaded.reason is Reason.COMPLETE) == (count == len(keys))
            assert self.there.issuperset(keys[:count]), "found what was deleted"
            assert loaded.reason is not Reason.MISS or keys[count] not in self.safe, "lost"
            self.held.append(loaded.leases)

    @rule(at=st.integers(0, 9))
    def release(self, at: int) -> None:
        if self.held:
            self.manager.release(self.held.pop(at % len(self.held)))

    @rule(keys=wishes, failing=st.booleans())
    def delete(self, keys: list[Key], failing: bool) -> None:
        with self.troubled(failing):
            try:
                self.do(self.manager.delete(keys))
            except Unavailable:
                if not failing:
                    raise
                self.owed.update(keys)
        for known in (self.fresh, self.safe, self.there):
            known.difference_update(keys)

    @rule(restart=st.booleans())
    def rest(self, restart: bool) -> None:
        """With nothing in its way what was flushed is there, nothing is held, and books and tier agree."""
        for batch in self.held:
            self.manager.release(batch)
        self.held.clear()
        self.do(asyncio.sleep(300))  # what failed is tried again until it is done
        self.flush()
        self.do(self.manager.delete([*self.owed]))
        self.owed.clear()
        if restart:
            shutdown = self.do(self.manager.aclose())
            assert not shutdown.unwritten and not shutdown.errors, shutdown
            self.begin()
        holdings, stored = self.manager.tiers[0].holdings, {*self.kept._values}
        index = holdings.index
        known = {index.key(slot) for slot in index.slots() if index.visible(slot)}
        assert known <= stored <= known.union(holdings.leaving), "the index is not what is there"
        assert self.safe <= known <= self.there, "flushed and lost, or deleted and there"
        stock = self.manager.pool.accounting()
        held = (stock.reserved, stock.quarantined, stock.leased, stock.dirty)
        assert held == (0, 0, 0, 0), stock
        self.manager.check()

    def teardown(self) -> None:
        try:
            if hasattr(self, "manager"):
                self.rest(restart=True)
                self.do(self.manager.aclose())
            assert not self.loop.failures, self.loop.failures
        finally:
            self.loop.close()


ManagerMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, derandomize=True
)
TestManager = ManagerMachine.TestCase
