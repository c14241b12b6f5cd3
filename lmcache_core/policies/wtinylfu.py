"""Window TinyLFU: a newcomer stays only if it is asked for more often than what it would push out.

Paper: G. Einziger, R. Friedman, B. Manes, TinyLFU: a highly efficient cache admission policy, ACM
    TOS 13(4), 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache_core.policies.queues import Entry, Queue, QueuePolicy, first_idle

_HALVED = bytes(count >> 1 for count in range(256))


@dataclass(frozen=True, slots=True)
class WTinyLFUConfig:
    """Knobs.

    Attributes:
        window_share: part of the capacity where newcomers show their worth.
        protected_share: part of the rest for values used again.
    """

    window_share: float = 0.8
    protected_share: float = 0.8


class Sketch:
    """Counts of uses by fingerprint: four rows of counters up to 15, halved from time to time."""

    def __init__(self) -> None:
        self.width = 256
        self._rows = [bytearray(self.width) for _ in range(4)]
        self._uses = 0

    def grow(self, values: int) -> None:
        """Make the rows at least as wide as the number of values; estimates stay as they are."""
        while self.width < values:
            self._rows = [row * 2 for row in self._rows]
            self.width *= 2

    def add(self, fingerprint: int) -> None:
        """Count one use."""
        for row in self._rows:
            at = fingerprint & self.width - 1
            if row[at] < 15:
                row[at] += 1
            fingerprint >>= 13
        self._uses += 1
        if self._uses >= 10 * self.width:
            self._uses //= 2
            self._rows = [row.translate(_HALVED) for row in self._rows]

    def estimate(self, fingerprint: int) -> int:
        """At least the number of recent uses, up to 15."""
        found = 15
        for row in self._rows:
            found = min(found, row[fingerprint & self.width - 1])
            fingerprint >>= 13
        return found


class WTinyLFU(QueuePolicy):
    """An LRU window in front of a segmented LRU (probation, protected).

    Insertion order: as most recent of the window. Deviations: sizes are bytes; the window is large
    (the paper: 1 %), because a window shorter than one prompt rejects the root of every new prefix;
    ties go to the newcomer; the window's oldest value and the main part's oldest meet when room is
    needed, not when the window overflows; no doorkeeper; the sketch grows with the number of values
    instead of being sized beforehand.
    """

    config_type = WTinyLFUConfig

    def __init__(self, config: WTinyLFUConfig, capacity: int, /) -> None:
        self._window_room = config.window_share * capacity
        self._main_room = capacity - self._window_room
        self._protected_room = config.protected_share * self._main_room
        self._window, self._probation, self._protected = Queue(), Queue(), Queue()
        self._sketch = Sketch()
        super().__init__(self._window, self._probation, self._protected)

    def insert(self, slot: int, fingerprint: int, nbytes: int, cost: float, /) -> None:
        self._window.add(slot, Entry(fingerprint, nbytes))
        self._fresh.add(slot)
        self._sketch.grow(sum(map(len, self._queues)))
        self._sketch.add(fingerprint)
        while self._window.nbytes > self._window_room and (
            self._probation.nbytes + self._protected.nbytes + nbytes <= self._main_room
        ):
            self._admit()

    def touch(self, slots: Sequence[int], /) -> None:
        for slot in slots:
            queue = self._holding(slot)
            if not self._fresh.end(slot):
                self._sketch.add(queue[slot].fingerprint)
                if queue is self._probation:
                    queue.move(slot, self._protected)
                    while self._protected.nbytes > self._protected_room:
                        self._protected.move(next(iter(self._protected)), self._probation)
                    continue
            queue.move_to_end(slot)

    def victim(self, busy: Callable[[int], bool], /) -> int | None:
        old = first_idle(busy, self._probation, self._protected)
        new = first_idle(busy, self._window)
        if old is None or new is None:
            return new if old is None else old
        if self._window.nbytes < self._window_room:
            return old
        estimate = self._sketch.estimate
        worth, needed = (estimate(self._holding(slot)[slot].fingerprint) for slot in (new, old))
        return old if worth >= needed else new

    def remove(self, slot: int, /, *, evicted: bool = False) -> None:
        queue, _ = self._take(slot)
        if evicted and queue is not self._window and self._window.nbytes >= self._window_room:
            self._admit()

    def check(self) -> None:
        super().check()
        assert self._protected.nbytes <= self._protected_room, "too much is protected"

    def _admit(self) -> None:
        """Move the oldest value of the window to the main part."""
        if self._window:
            self._window.move(next(iter(self._window)), self._probation)
