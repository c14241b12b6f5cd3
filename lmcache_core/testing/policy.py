"""Laws of eviction policies, one test each. Subclass ``PolicyTests`` and give ``make_policy``."""

from __future__ import annotations

import gc
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable

from lmcache_core.spi.policy import EvictionPolicy
from lmcache_core.testing.replay import Replayed, Requests, fingerprint_of, never_busy, replay

CAPACITY = 64


class _Index:
    """Drives a policy as an index does, with unit sizes, and knows what must be resident."""

    def __init__(self, policy: EvictionPolicy, seed: int = 0, *, lend: bool = False) -> None:
        self.policy = policy
        self.lend = lend
        self.rng = random.Random(seed)
        self.free = list(range(CAPACITY))
        self.held: list[int] = []
        self.busy: set[int] = set()
        self.log: list[tuple[str, int]] = []

    def insert(self, value: int) -> None:
        while not self.free:
            victim = self.policy.victim(self.busy.__contains__)
            assert victim in self.held, f"P1: the victim {victim} is not resident"
            assert victim not in self.busy, f"P3: the victim {victim} is busy"
            self.drop(victim, evicted=True)
        slot = self.free.pop()
        self.policy.insert(slot, fingerprint_of(value), 1, 1.0)
        self.held.append(slot)

    def drop(self, slot: int, *, evicted: bool) -> None:
        self.policy.remove(slot, evicted=evicted)
        self.log.append(("evicted" if evicted else "removed", slot))
        self.held.remove(slot)
        self.free.append(slot)

    def some(self, most: int) -> list[int]:
        return self.rng.sample(self.held, min(len(self.held), self.rng.randint(1, most)))

    def step(self) -> None:
        """One random legal call."""
        action = self.rng.random()
        if action < 0.5 or not self.held:
            self.insert(self.rng.randrange(3 * CAPACITY))
        elif action < 0.8:
            self.policy.touch(self.some(8))
        elif action < 0.85:
            self.policy.hint(self.some(4))
        elif action < 0.9:
            self.drop(self.rng.choice(self.held), evicted=False)
        elif action < 0.95:
            self.busy = set(self.some(CAPACITY // 2)) if self.lend else set()
        else:
            self.policy.admit(fingerprint_of(self.rng.randrange(3 * CAPACITY)), 1)

    def drain(self) -> list[int]:
        gone = []
        while (slot := self.policy.victim(never_busy)) is not None:
            assert slot in self.held, f"P1: the victim {slot} is not resident"
            self.drop(slot, evicted=True)
            gone.append(slot)
        return gone


class PolicyTests(ABC):
    """Each test is one law; its docstring is the law."""

    @abstractmethod
    def make_policy(self, capacity: int, /) -> EvictionPolicy:
        """A new policy for a tier of so many bytes."""

    def make_model(self, capacity: int, /) -> EvictionPolicy | None:
        """A naive policy that must choose the same victims; None when there is none."""
        return None

    def test_every_resident_leaves_exactly_once(self) -> None:
        """P1: victims are resident, what was removed is not, and eviction empties the cache."""
        index = _Index(self.make_policy(CAPACITY))
        assert index.policy.victim(never_busy) is None, "P1: an empty cache has no victim"
        for value in range(CAPACITY):
            index.insert(value)
            index.policy.touch(index.some(4))
        for slot in range(0, CAPACITY, 3):
            index.drop(slot, evicted=False)
        resident = {*index.held}
        assert {*index.drain()} == resident and not index.held, "P1: a resident slot never leaves"

    def test_naming_a_victim_changes_nothing(self) -> None:
        """P2: asking again gives the same answer."""
        for seed in range(10):
            index = _Index(self.make_policy(CAPACITY), seed)
            for _ in range(200):
                index.step()
                named = [index.policy.victim(never_busy) for _ in range(3)]
                assert len({*named}) == 1, f"P2: three questions, the answers {named}"

    def test_busy_slots_are_passed_over(self) -> None:
        """P3: a victim is not busy; None exactly when all are."""
        index = _Index(self.make_policy(CAPACITY))
        for value in range(CAPACITY):
            index.insert(value)
        index.policy.touch(index.some(CAPACITY))
        seen: set[int] = set()
        for _ in range(CAPACITY):
            victim = index.policy.victim(seen.__contains__)
            assert victim is not None and victim not in seen, "P3: the victim is busy"
            seen.add(victim)
        assert index.policy.victim(seen.__contains__) is None, "P3: all are busy, yet one is named"
        assert index.policy.victim(never_busy) is not None, "P3: being busy is not for ever"
        index = _Index(self.make_policy(CAPACITY), lend=True)
        for _ in range(1000):
            index.step()

    def test_equal_calls_have_equal_victims(self) -> None:
        """P4: no clock, no randomness, no order of a hash."""
        logs = []
        for _ in range(2):
            index = _Index(self.make_policy(CAPACITY), seed=5)
            for _ in range(2000):
                index.step()
            index.drain()
            logs.append(index.log)
        assert logs[0] == logs[1], "P4: equal calls, other victims"

    def test_a_reused_slot_has_no_past(self) -> None:
        """P5: what a slot's earlier value did has no effect on the later one."""
        orders = []
        for past in (0, 20):
            index = _Index(self.make_policy(CAPACITY))
            index.insert(1000)
            for _ in range(past):
                index.policy.touch(index.held)
            index.drop(index.held[0], evicted=False)
            for value in range(CAPACITY):
                index.insert(value)
            orders.append(index.drain())
        assert orders[0] == orders[1], "P5: a removed value still counts"

    def test_invariants_hold_after_every_call(self) -> None:
        """P6: ``check`` passes at any time, hints and deletions included."""
        for seed in range(20):
            index = _Index(self.make_policy(CAPACITY), seed)
            for _ in range(300):
                index.step()
                index.policy.check()

    def test_memory_does_not_grow_with_traffic(self) -> None:
        """P7: ghosts and sketches are bounded by the capacity, not by what passed through."""
        index = _Index(self.make_policy(CAPACITY))
        sizes = []
        for value in range(120 * CAPACITY):
            index.insert(value)
            index.policy.touch(index.held[-1:])
            if value + 1 in (20 * CAPACITY, 120 * CAPACITY):
                sizes.append(_reachable_nbytes(index.policy))
        assert sizes[1] <= 1.5 * sizes[0] + 4096, f"P7: {sizes[0]} bytes became {sizes[1]}"

    def test_hints_keep_everything_resident(self) -> None:
        """P8: a hint moves nothing in or out."""
        index = _Index(self.make_policy(CAPACITY))
        for value in range(CAPACITY):
            index.insert(value)
        for _ in range(50):
            index.policy.hint(index.some(CAPACITY))
            index.policy.touch(index.some(8))
        assert {*index.drain()} == {*range(CAPACITY)}, "P8: a hinted slot never leaves"

    def test_replay_agrees_with_a_naive_model(self) -> None:
        """P9: on prefix traffic the policy does what the plainest writing of its rule does."""
        requests = _prefix_traffic(200)
        for capacity in (7, 40, 200):
            gone, replayed = _victims(self.make_policy(capacity), requests, capacity)
            assert 0 < replayed.hits < replayed.asked, "P9: prefix traffic has some hits"
            model = self.make_model(capacity)
            if model is not None:
                same = (
                    gone == _victims(model, requests, capacity)[0]
                )  # no diff of long lists is made
                assert same, "P9: other victims than the naive model"

    def test_it_is_made_from_its_default_configuration(self) -> None:
        """P10: ``config_type()`` is enough to make one."""
        kind = type(self.make_policy(CAPACITY))
        kind(kind.config_type(), CAPACITY).check()


def _victims(
    policy: EvictionPolicy, requests: Requests, capacity: int
) -> tuple[list[int], Replayed]:
    """Who left in a replay, in order, and its outcome."""
    gone: list[int] = []
    remove = policy.remove

    def noting(slot: int, /, *, evicted: bool = False) -> None:
        gone.append(slot)
        remove(slot, evicted=evicted)

    policy.remove = noting  # type: ignore[method-assign]  # of this instance
    return gone, replay(policy, requests, capacity)


def _prefix_traffic(count: int) -> list[list[int]]:
    """Conversations that take turns and grow, with a shared beginning; seeded."""
    rng = random.Random(11)
    talks: list[list[int]] = []
    requests: list[list[int]] = []
    fresh = 10
    for _ in range(count):
        if not talks or rng.random() < 0.2:
            talks.append(list(range(rng.choice((1, 3)))))
        talk = talks[max(0, len(talks) - 1 - int(rng.expovariate(0.3)))]
        new = rng.randint(1, 6)
        talk += range(fresh, fresh + new)
        fresh += new
        requests.append(list(talk))
    return requests


def _reachable_nbytes(root: object) -> int:
    """Bytes of everything only data can reach from an object."""
    seen: set[int] = set()
    queue: list[object] = [root]
    total = 0
    while queue:
        each = queue.pop()
        if id(each) not in seen and not isinstance(each, type | Callable):
            seen.add(id(each))
            total += sys.getsizeof(each)
            queue += gc.get_referents(each)
    return total
