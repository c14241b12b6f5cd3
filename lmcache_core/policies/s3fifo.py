"""Three static queues: most values are used once and should leave quickly.

Paper: J. Yang et al., FIFO queues are all you need for cache eviction, SOSP 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache_core.policies.queues import Entry, Queue, QueuePolicy, first_idle, miscounted


@dataclass(frozen=True, slots=True)
class S3FIFOConfig:
    """Knobs.

    Attributes:
        small_share: part of the capacity for values not yet used again.
        uses: uses in the small queue that lead to the main queue.
    """

    small_share: float = 0.5
    uses: int = 1


class S3FIFO(QueuePolicy):
    """Queues small and main, and a ghost queue of values that left small.

    Insertion order: at the end of small, or of main when a ghost remembers the value; the first
    touch moves it to the end once more, leaves before roots.
    Deviations: sizes are bytes; half the capacity is small (the paper: a tenth) and one use leads
        to main (the
    paper: two), because prefixes return late and as a whole; both measured on the replayed traces.
        Second chances are spent when ``victim`` looks, even if the caller then evicts nothing.
    """

    config_type = S3FIFOConfig

    def __init__(self, config: S3FIFOConfig, capacity: int, /) -> None:
        self._room = config.small_share * capacity
        self._ghost_room = capacity - self._room
        self._uses = config.uses
        self._small, self._main, self._ghosts = Queue(), Queue(), Queue()
        super().__init__(self._small, self._main)

    def insert(self, slot: int, fingerprint: int, nbytes: int, cost: float, /) -> None:
        into = self._main if self._ghosts.drop(fingerprint) else self._small
        into.add(slot, Entry(fingerprint, nbytes))
        self._fresh.add(slot)

    def touch(self, slots: Sequence[int], /) -> None:
        for slot in slots:
            queue = self._holding(slot)
            if self._fresh.end(slot):
                queue.move_to_end(slot)
            elif queue[slot].uses < 3:
                queue[slot].uses += 1

    def victim(self, busy: Callable[[int], bool], /) -> int | None:
        chosen = self._from_small(busy, self._room if self._main else -1)
        if chosen is None:
            chosen = self._from_main(busy)
        return first_idle(busy, self._small) if chosen is None else chosen  # all of main is busy

    def remove(self, slot: int, /, *, evicted: bool = False) -> None:
        queue, entry = self._take(slot)
        if evicted and queue is self._small:
            self._ghosts.add(entry.fingerprint, entry)
            self._ghosts.trim(self._ghost_room)

    def check(self) -> None:
        super().check()
        miscounted((self._ghosts,))
        assert self._ghosts.nbytes <= self._ghost_room, "too many ghosts"

    def _from_small(self, busy: Callable[[int], bool], room: float) -> int | None:
        """First unused value of small while that holds more than ``room``; used ones move on."""
        promoted: list[int] = []
        chosen = None
        held = self._small.nbytes
        for slot, entry in self._small.items():
            if held <= room:
                break
            if entry.uses >= self._uses:
                promoted.append(slot)
                entry.uses = 0
                held -= entry.nbytes
                room = self._room  # main is not empty any more
            elif not busy(slot):
                chosen = slot
                break
        for slot in promoted:
            self._small.move(slot, self._main)
        return chosen

    def _from_main(self, busy: Callable[[int], bool]) -> int | None:
        for _ in range(4):  # no value survives more than three laps
            spared: list[int] = []
            chosen = None
            for slot, entry in self._main.items():
                if busy(slot):
                    continue
                if not entry.uses:
                    chosen = slot
                    break
                spared.append(slot)
            for slot in spared:
                self._main[slot].uses -= 1
                self._main.move_to_end(slot)
            if chosen is not None or not spared:
                return chosen
        return None
