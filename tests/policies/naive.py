"""The plainest writing of some rules: one list, searched from end to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmcache_core.spi.policy import EvictionPolicy


class Naive(EvictionPolicy):
    """Keeps (slot, uses, last use, bytes, priority) and lets ``rank`` say who leaves."""

    config_type = type(None)

    def __init__(self, config: None, capacity: int, /) -> None:
        self.slots: list[int] = []
        self.uses: dict[int, int] = {}
        self.used_at: dict[int, float] = {}
        self.came_at: dict[int, float] = {}
        self.priority: dict[int, float] = {}
        self.age = 0.0
        self.clock = 0

    def rank(self, slot: int) -> tuple[float, ...]:
        raise AssertionError("a model has a rank")

    def insert(self, slot: int, fingerprint: int, nbytes: int, cost: float, /) -> None:
        self.clock += 1
        self.slots.append(slot)
        self.uses[slot] = 0
        self.came_at[slot] = self.used_at[slot] = self.clock
        self.priority[slot] = self.age + cost / nbytes

    def touch(self, slots: Sequence[int], /) -> None:
        for slot in slots:
            self.clock += 1
            self.uses[slot] += 1
            self.used_at[slot] = self.clock
            self.priority[slot] = self.age + self.uses[slot]

    def victim(self, busy: Callable[[int], bool], /) -> int | None:
        return min((s for s in self.slots if not busy(s)), key=self.rank, default=None)

    def remove(self, slot: int, /, *, evicted: bool = False) -> None:
        self.slots.remove(slot)
        if evicted:
            self.age = max(self.age, self.priority[slot])

    def check(self) -> None:
        assert len({*self.slots}) == len(self.slots)


class NaiveLRU(Naive):
    def rank(self, slot: int) -> tuple[float, ...]:
        return (self.used_at[slot],)


class NaiveFIFO(Naive):
    def rank(self, slot: int) -> tuple[float, ...]:
        return (self.came_at[slot],)


class NaiveMRU(Naive):
    def touch(self, slots: Sequence[int], /) -> None:
        super().touch(slots[::-1])

    def rank(self, slot: int) -> tuple[float, ...]:
        return (-self.used_at[slot],)


class NaiveLFU(Naive):
    def rank(self, slot: int) -> tuple[float, ...]:
        return (min(15, max(1, self.uses[slot])), self.used_at[slot])


class NaiveGDSF(Naive):
    def rank(self, slot: int) -> tuple[float, ...]:
        return (self.priority[slot], self.used_at[slot])


class NaiveARC(Naive):
    """The paper's lists as plain lists of fingerprints, unit sizes only."""

    def __init__(self, config: None, capacity: int, /) -> None:
        super().__init__(config, capacity)
        self.capacity = capacity
        self.again: set[int] = set()
        self.name: dict[int, int] = {}
        self.ghosts: tuple[list[int], list[int]] = ([], [])
        self.target = 0.0

    def insert(self, slot: int, fingerprint: int, nbytes: int, cost: float, /) -> None:
        super().insert(slot, fingerprint, nbytes, cost)
        self.name[slot] = fingerprint
        self.again.discard(slot)
        first, second = self.ghosts
        if fingerprint in first:
            self.target = min(self.capacity, self.target + max(1, len(second) / len(first)))
        elif fingerprint in second:
            self.target = max(0, self.target - max(1, len(first) / len(second)))
        if fingerprint in first + second:
            self.again.add(slot)
        for ghosts in self.ghosts:
            if fingerprint in ghosts:
                ghosts.remove(fingerprint)
        self.trim()

    def touch(self, slots: Sequence[int], /) -> None:
        super().touch(slots)
        self.again |= {slot for slot in slots if self.uses[slot] > 1}

    def rank(self, slot: int) -> tuple[float, ...]:
        from_once = len(self.slots) - len(self.again) > self.target
        return ((slot in self.again) is from_once, self.used_at[slot])

    def remove(self, slot: int, /, *, evicted: bool = False) -> None:
        super().remove(slot, evicted=evicted)
        if evicted:
            self.ghosts[slot in self.again].append(self.name[slot])
        self.again.discard(slot)
        self.trim()

    def trim(self) -> None:
        once = len(self.slots) - len(self.again)
        first, second = self.ghosts
        while first and once + len(first) > self.capacity:
            first.pop(0)
        while second and len(self.slots) + len(first) + len(second) > 2 * self.capacity:
            second.pop(0)
