"""Greedy dual size frequency: keeps what is dear to recompute per byte and used often.

Paper: L. Cherkasova, Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching
    policy,
HPL-98-69, 1998.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from lmcache_core.policies.queues import Fresh, NoKnobs
from lmcache_core.spi.policy import EvictionPolicy


@dataclass(slots=True)
class _Entry:
    value: float
    uses: int = 1
    order: int = 0
    priority: float = 0.0


class GDSF(EvictionPolicy):
    """The value with the least ``age + uses * cost / bytes`` leaves first; age rises to what last
    left.

    Insertion order: by its own priority, after equals. Deviations: O(log n) for a use, by a heap
    with stale entries that is rebuilt when they outnumber the live ones.
    """

    config_type = NoKnobs

    def __init__(self, config: NoKnobs, capacity: int, /) -> None:
        self._entries: dict[int, _Entry] = {}
        self._fresh = Fresh()
        self._heap: list[tuple[float, int, int]] = []
        self._age = 0.0
        self._clock = 0

    def insert(self, slot: int, fingerprint: int, nbytes: int, cost: float, /) -> None:
        self._entries[slot] = _Entry(cost / max(1, nbytes))
        self._fresh.add(slot)
        self._push(slot)

    def touch(self, slots: Sequence[int], /) -> None:
        for slot in slots:
            if not self._fresh.end(slot):
                self._entries[slot].uses += 1
            self._push(slot)

    def victim(self, busy: Callable[[int], bool], /) -> int | None:
        skipped: list[tuple[float, int, int]] = []
        chosen = None
        while self._heap:
            top = self._heap[0]
            entry = self._entries.get(top[2])
            if entry is not None and entry.order == top[1]:
                if not busy(top[2]):
                    chosen = top[2]
                    break
                skipped.append(top)
            heappop(self._heap)
        for each in skipped:
            heappush(self._heap, each)
        return chosen

    def remove(self, slot: int, /, *, evicted: bool = False) -> None:
        entry = self._entries.pop(slot)
        self._fresh.end(slot)
        if evicted:
            self._age = max(self._age, entry.priority)
        self._rebuild()

    def check(self) -> None:
        live = {order for _, order, slot in self._heap if slot in self._entries}
        assert all(e.order in live for e in self._entries.values()), "a slot is not in the heap"
        assert self._fresh.keys() <= self._entries.keys(), "a fresh slot is not held"
        assert len(self._heap) <= 2 * len(self._entries) + 64, "stale entries pile up"

    def _push(self, slot: int) -> None:
        entry = self._entries[slot]
        self._clock += 1
        entry.order = self._clock
        entry.priority = self._age + entry.uses * entry.value
        heappush(self._heap, (entry.priority, entry.order, slot))
        self._rebuild()

    def _rebuild(self) -> None:
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [(e.priority, e.order, s) for s, e in self._entries.items()]
            heapify(self._heap)
