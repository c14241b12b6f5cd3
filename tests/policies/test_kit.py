"""The laws of policies catch wrong policies: each mutant breaks the laws named beside it, and no other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count

import pytest

from lmcache_core.spi.policy import EvictionPolicy
from lmcache_core.testing.policy import PolicyTests
from tests.policies.naive import NaiveLRU


class Right(EvictionPolicy):
    """A small LRU that keeps every law; each mutant below changes one thing."""

    config_type = type(None)

    def __init__(self, config: None, capacity: int, /) -> None:
        self.order: OrderedDict[int, int] = OrderedDict()
        self.capacity = capacity
        self.ghosts: OrderedDict[int, None] = OrderedDict()

    def insert(self, slot: int, fingerprint: int, nbytes: int, cost: float, /) -> None:
        self.order[slot] = fingerprint

    def touch(self, slots: Sequence[int], /) -> None:
        for slot in slots:
            self.order.move_to_end(slot)

    def victim(self, busy: Callable[[int], bool], /) -> int | None:
        return next((slot for slot in self.order if not busy(slot)), None)

    def remove(self, slot: int, /, *, evicted: bool = False) -> None:
        self.ghosts[self.order.pop(slot)] = None
        self.trim()

    def trim(self) -> None:
        while len(self.ghosts) > self.capacity:
            self.ghosts.popitem(last=False)

    def check(self) -> None:
        assert all(slot >= 0 for slot in self.order)


class KeepsRemoved(Right):
    def remove(self, slot: int, /, *, evicted: bool = False) -> None:
        if not evicted:
            self.order.move_to_end(slot)
        else:
            super().remove(slot)


class EvictsWhileLooking(Right):
    def victim(self, busy: Callable[[int], bool], /) -> int | None:
        slot = super().victim(busy)
        if slot is not None:
            self.order.move_to_end(slot)
        return slot


class IgnoresBusy(Right):
    def victim(self, busy: Callable[[int], bool], /) -> int | None:
        return next(iter(self.order), None)


class GivesUpWhenTheFirstIsBusy(Right):
    def victim(self, busy: Callable[[int], bool], /) -> int | None:
        first = next(iter(self.order), None)
        return None if first is None or busy(first) else first


class Drifts(Right):
    made = count()

    def __init__(self, config: None, capacity: int, /) -> None:
        super().__init__(config, capacity)
        self.last = next(self.made) % 2 == 1

    def victim(self, busy: Callable[[int], bool], /) -> int | None:
        slots = [slot for slot in self.order if not busy(slot)]
        return (slots[-1] if self.last else slots[0]) if slots else None


class RemembersTheSlot(Right):
    def __init__(self, config: None, capacity: int, /) -> None:
        super().__init__(config, capacity)
        self.uses: dict[int, int] = {}

    def touch(self, slots: Sequence[int], /) -> None:
        for slot in slots:
            self.uses[slot] = self.uses.get(slot, 0) + 1

    def victim(self, busy: Callable[[int], bool], /) -> int | None:
        slots = [slot for slot in self.order if not busy(slot)]
        return min(slots, key=lambda slot: self.uses.get(slot, 0), default=None)


class Miscounts(Right):
    def check(self) -> None:
        assert len(self.order) < 60, "as if a counter had run away"


class NeverForgets(Right):
    def trim(self) -> None:
        pass


class DropsHinted(Right):
    def hint(self, slots: Sequence[int], /) -> None:
        for slot in slots[:1]:
            self.order.pop(slot, None)

    def touch(self, slots: Sequence[int], /) -> None:
        super().touch([slot for slot in slots if slot in self.order])

    def remove(self, slot: int, /, *, evicted: bool = False) -> None:
        self.order.setdefault(slot, 0)
        super().remove(slot)


class MostRecentFirst(Right):
    def victim(self, busy: Callable[[int], bool], /) -> int | None:
        return next((slot for slot in reversed(self.order) if not busy(slot)), None)


class TooManyArguments(Right):
    def __init__(self, config: None, capacity: int, more: int = 0, /) -> None:
        super().__init__(config, capacity)
        assert more, "a third argument is needed"


LAWS = {
    "every_resident_leaves_exactly_once": "P1",
    "naming_a_victim_changes_nothing": "P2",
    "busy_slots_are_passed_over": "P3",
    "equal_calls_have_equal_victims": "P4",
    "a_reused_slot_has_no_past": "P5",
    "invariants_hold_after_every_call": "P6",
    "memory_does_not_grow_with_traffic": "P7",
    "hints_keep_everything_resident": "P8",
    "replay_agrees_with_a_naive_model": "P9",
    "it_is_made_from_its_default_configuration": "P10",
}
MUTANTS: dict[type[Right], set[str]] = {
    Right: set(),
    KeepsRemoved: {"P1"},
    EvictsWhileLooking: {"P2"},
    IgnoresBusy: {"P3"},
    GivesUpWhenTheFirstIsBusy: {"P3"},
    Drifts: {"P4", "P5", "P9"},
    RemembersTheSlot: {"P5", "P9"},
    Miscounts: {"P6"},
    NeverForgets: {"P7"},
    DropsHinted: {"P8"},
    MostRecentFirst: {"P9"},
    TooManyArguments: {"P10"},
}


def broken(kind: type[Right]) -> set[str]:
    """Laws that a policy breaks."""

    class Suite(PolicyTests):
        def make_policy(self, capacity: int, /) -> EvictionPolicy:
            return kind(None, capacity) if kind is not TooManyArguments else kind(None, capacity, 1)

        def make_model(self, capacity: int, /) -> EvictionPolicy:
            return NaiveLRU(None, capacity)

    found = set()
    for name, law in LAWS.items():
        try:
            getattr(Suite(), f"test_{name}")()
        except (AssertionError, LookupError):
            found.add(law)
    return found


@pytest.mark.parametrize("kind", MUTANTS, ids=lambda kind: kind.__name__)
def test_a_mutant_breaks_its_own_laws_and_no_other(kind: type[Right]) -> None:
    assert broken(kind) == MUTANTS[kind]


def test_every_law_of_the_kit_has_a_mutant() -> None:
    laws = {name for name in dir(PolicyTests) if name.startswith("test_")}
    assert laws == {f"test_{name}" for name in LAWS}
    assert {law for found in MUTANTS.values() for law in found} == {*LAWS.values()}
