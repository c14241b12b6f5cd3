"""The books of one tier: whatever happens, the sums are true and the limit holds."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lmcache_core.policies.lru import LRU, LRUConfig
from lmcache_core.storage.holdings import Holdings
from lmcache_core.testing.worlds import key_of

LIMIT, QUOTA = 100_000, 40_000
KEYS = st.integers(0, 12).map(key_of)
SIZES = st.integers(1, 30_000)


class Books(RuleBasedStateMachine):
    """What a tier does with its holdings, in any order."""

    def __init__(self):
        super().__init__()
        self.holdings = Holdings(
            LIMIT,
            LRU(LRUConfig(), LIMIT),
            lambda nbytes: -(-nbytes // 4096) * 4096,
            quota=lambda tenant: QUOTA if tenant == "small" else None,
        )
        self.held = []
        self.disk = {}

    @rule(key=KEYS, nbytes=SIZES, tenant=st.sampled_from(["", "small"]))
    def store(self, key, nbytes, tenant):
        holdings = self.holdings
        if holdings.index.slot_of(key) >= 0:
            return
        need = holdings.footprint(nbytes)
        before = set(holdings.leaving)
        victims = holdings.victims(need, tenant)
        if victims is None:
            assert set(holdings.leaving) == before, "refused, but something left"
            return
        self.sweep()
        if holdings.charge(key, need):
            self.disk[key] = need
            assert sum(self.disk.values()) <= LIMIT

    @rule(key=KEYS, shorter=st.integers(0, 4096))
    def end(self, key, shorter):
        if key in self.holdings.coming:
            stored = max(1, self.holdings.coming[key] - shorter)
            self.holdings.arrived(key, stored, 0)
            self.disk[key] = self.holdings.footprint(stored)

    @rule(key=KEYS)
    def fail(self, key):
        if key in self.holdings.coming:
            self.holdings.doubt(key)

    @rule(key=KEYS)
    def refuse(self, key):
        if key in self.holdings.coming:
            self.holdings.cancel(key)
            self.disk.pop(key)

    @rule(keys=st.lists(KEYS))
    def use(self, keys):
        self.holdings.touch(self.holdings.find(keys, 0.0))
        self.held.append(self.holdings.hold(keys))

    @rule()
    def leave(self):
        if self.held:
            self.holdings.release(self.held.pop())

    @rule(key=KEYS)
    def delete(self, key):
        if (slot := self.holdings.index.slot_of(key)) >= 0:
            self.holdings.hide(slot)

    @rule()
    def sweep(self):
        for key in list(self.holdings.leaving):
            self.disk.pop(key, None)
        self.holdings.left(list(self.holdings.leaving))

    @invariant()
    def sums_are_true(self):
        self.holdings.check()
        assert self.holdings.used >= sum(self.disk.values()), "bytes that are not charged"


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
