"""Every policy of this house keeps the laws of its kind."""

from __future__ import annotations

from lmcache_core.policies.arc import ARC
from lmcache_core.policies.fifo import FIFO
from lmcache_core.policies.gdsf import GDSF
from lmcache_core.policies.lfu import LFU, LFUConfig
from lmcache_core.policies.lru import LRU, LRUConfig
from lmcache_core.policies.mru import MRU
from lmcache_core.policies.queues import PERIOD, NoKnobs
from lmcache_core.policies.s3fifo import S3FIFO, S3FIFOConfig
from lmcache_core.policies.wtinylfu import Sketch, WTinyLFU, WTinyLFUConfig
from lmcache_core.spi.policy import EvictionPolicy
from lmcache_core.testing.policy import PolicyTests
from lmcache_core.testing.replay import fingerprint_of
from tests.policies import naive


class TestLRU(PolicyTests):
    def make_policy(self, capacity: int, /) -> EvictionPolicy:
        return LRU(LRUConfig(), capacity)

    def make_model(self, capacity: int, /) -> EvictionPolicy:
        return naive.NaiveLRU(None, capacity)


class TestFIFO(PolicyTests):
    def make_policy(self, capacity: int, /) -> EvictionPolicy:
        return FIFO(NoKnobs(), capacity)

    def make_model(self, capacity: int, /) -> EvictionPolicy:
        return naive.NaiveFIFO(None, capacity)


class TestMRU(PolicyTests):
    def make_policy(self, capacity: int, /) -> EvictionPolicy:
        return MRU(NoKnobs(), capacity)

    def make_model(self, capacity: int, /) -> EvictionPolicy:
        return naive.NaiveMRU(None, capacity)


class TestLFU(PolicyTests):
    def make_policy(self, capacity: int, /) -> EvictionPolicy:
        return LFU(LFUConfig(), capacity)


class TestLFUWithoutFading(PolicyTests):
    def make_policy(self, capacity: int, /) -> EvictionPolicy:
        return LFU(LFUConfig(fade=0), capacity)

    def make_model(self, capacity: int, /) -> EvictionPolicy:
        return naive.NaiveLFU(None, capacity)


class TestARC(PolicyTests):
    def make_policy(self, capacity: int, /) -> EvictionPolicy:
        return ARC(NoKnobs(), capacity)

    def make_model(self, capacity: int, /) -> EvictionPolicy:
        return naive.NaiveARC(None, capacity)


class TestS3FIFO(PolicyTests):
    def make_policy(self, capacity: int, /) -> EvictionPolicy:
        return S3FIFO(S3FIFOConfig(), capacity)


class TestWTinyLFU(PolicyTests):
    def make_policy(self, capacity: int, /) -> EvictionPolicy:
        return WTinyLFU(WTinyLFUConfig(), capacity)


class TestGDSF(PolicyTests):
    def make_policy(self, capacity: int, /) -> EvictionPolicy:
        return GDSF(NoKnobs(), capacity)

    def make_model(self, capacity: int, /) -> EvictionPolicy:
        return naive.NaiveGDSF(None, capacity)


def test_a_touch_long_after_the_insertion_is_a_reuse() -> None:
    """An index that never touches what it has just stored loses nothing."""
    for between, kept in ((10, False), (PERIOD, True)):
        policy = LFU(LFUConfig(fade=0), 10**6)
        for slot in range(between + 1):
            policy.insert(slot, slot, 1, 1.0)
        policy.touch([0, *range(1, between + 1)])
        order = []
        while (victim := policy.victim(idle)) is not None:
            policy.remove(victim)
            order.append(victim)
        assert (order[-1] == 0) is kept


def idle(slot: int) -> bool:
    return False


def test_dear_values_outlast_cheap_ones_per_byte() -> None:
    policy = GDSF(NoKnobs(), 1000)
    policy.insert(0, 0, 100, 50.0)
    policy.insert(1, 1, 10, 50.0)
    policy.insert(2, 2, 100, 500.0)
    assert policy.victim(idle) == 0
    policy.remove(0, evicted=True)
    policy.insert(3, 3, 100, 1.0)
    assert policy.victim(idle) == 3


def test_newcomers_leave_before_what_a_ghost_remembers() -> None:
    policy = S3FIFO(S3FIFOConfig(), 4)
    for slot in range(4):
        policy.insert(slot, slot, 1, 1.0)
        policy.touch([slot])
    evicted = []
    for value in (9, 0, *range(10, 30)):
        victim = policy.victim(idle)
        assert victim is not None
        evicted.append(victim)
        policy.remove(victim, evicted=True)
        policy.insert(victim, value, 1, 1.0)
        policy.touch([victim])
    assert evicted[0] == 0  # value 0 came back in the slot that was freed next
    assert evicted[1] not in evicted[2:]


def test_a_sketch_never_counts_too_little_and_keeps_its_counts_while_growing() -> None:
    sketch = Sketch()
    for i in range(100):
        for _ in range(i % 7):
            sketch.add(fingerprint_of(i))
    before = [sketch.estimate(fingerprint_of(i)) for i in range(100)]
    assert all(found >= i % 7 for i, found in enumerate(before))
    sketch.grow(5000)
    assert sketch.width == 8192
    assert [sketch.estimate(fingerprint_of(i)) for i in range(100)] == before
    for _ in range(100):
        sketch.add(7)
    assert sketch.estimate(7) == 15


def test_counts_fade_so_that_old_favourites_leave() -> None:
    policy = LFU(LFUConfig(), 8)
    for slot in range(2):
        policy.insert(slot, slot, 1, 1.0)
    for _ in range(20):
        policy.touch([0])
    for value in range(100):
        policy.remove(1, evicted=True)
        policy.insert(1, value, 1, 1.0)
        policy.touch([1])
        policy.touch([1])
        policy.touch([1])
    assert policy.victim(idle) == 0
