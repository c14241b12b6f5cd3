"""Three static queues: most values are used once and should leave quickly.

Paper: J. Yang et al., FIFO queues are all you need for cache eviction, SOSP 2023.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache_core.policies.fresh import Fresh
from lmcache_core.spi.policy import EvictionPolicy


@dataclass(frozen=True, slots=True)
class S3FIFOConfig:
    """Knobs.

    Attributes:
        small_share: part of the capacity for values not yet used again.
        uses: uses in the small queue that lead to the main queue.
    """

    small_share: float = 0.5
    uses: int = 1


class _Entry:
    __slots__ = ("fingerprint", "nbytes", "small", "uses")

    def __init__(self, fingerprint: int, nbytes: int, small: bool) -> None:
        self.fingerprint = fingerprint
        self.nbytes = nbytes
        self.small = small
        self.uses = 0


class S3FIFO(EvictionPolicy):
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
        self._entries: dict[int, _Entry] = {}
        self._fresh = Fresh()
        self._small: OrderedDict[int, _Entry] = OrderedDict()
        self._main: OrderedDict[int, _Entry] = OrderedDict()
        self._ghosts: OrderedDict[int, int] = OrderedDict()
        self._small_nbytes = self._ghost_nbytes = 0

    def insert(self, slot: int, fingerprint: int, nbytes: int, cost: float, /) -> None:
        remembered = self._ghosts.pop(fingerprint, None)
        self._ghost_nbytes -= remembered or 0
        entry = _Entry(fingerprint, nbytes, remembered is None)
        self._entries[slot] = entry
        self._fresh.add(slot)
        if entry.small:
            self._small[slot] = entry
            self._small_nbytes += nbytes
        else:
            self._main[slot] = entry

    def touch(self, slots: Sequence[int], /) -> None:
        for slot in slots:
            entry = self._entries[slot]
            if self._fresh.end(slot):
                (self._small if entry.small else self._main).move_to_end(slot)
            elif entry.uses < 3:
                entry.uses += 1

    def victim(self, busy: Callable[[int], bool], /) -> int | None:
        chosen = self._from_small(busy, self._room if self._main else -1)
        if chosen is None:
            chosen = self._from_main(busy)
        if chosen is None:  # all of main is busy
            chosen = next((slot for slot in self._small if not busy(slot)), None)
        return chosen

    def remove(self, slot: int, /, *, evicted: bool = False) -> None:
        entry = self._entries.pop(slot)
        self._fresh.end(slot)
        if not entry.small:
            del self._main[slot]
            return
        del self._small[slot]
        self._small_nbytes -= entry.nbytes
        if evicted:
            self._ghost_nbytes += entry.nbytes - self._ghosts.pop(entry.fingerprint, 0)
            self._ghosts[entry.fingerprint] = entry.nbytes
            while self._ghost_nbytes > self._ghost_room and self._ghosts:
                self._ghost_nbytes -= self._ghosts.popitem(last=False)[1]

    def check(self) -> None:
        assert not self._small.keys() & self._main.keys(), "a slot is in small and main"
        assert self._entries.keys() == self._small.keys() | self._main.keys(), "a slot is lost"
        assert self._small_nbytes == sum(e.nbytes for e in self._small.values()), "small miscounts"
        assert self._ghost_nbytes == sum(self._ghosts.values()), "ghosts miscount"
        assert self._fresh.keys() <= self._entries.keys(), "a fresh slot is not held"
        assert self._ghost_nbytes <= self._ghost_room, "too many ghosts"
        assert all(entry.small is (slot in self._small) for slot, entry in self._entries.items())

    def _from_small(self, busy: Callable[[int], bool], room: float) -> int | None:
        """First unused value of small while that holds more than ``room``; used ones move on."""
        promoted: list[int] = []
        chosen = None
        for slot, entry in self._small.items():
            if self._small_nbytes <= room:
                break
            if entry.uses >= self._uses:
                promoted.append(slot)
                self._small_nbytes -= entry.nbytes
                room = self._room  # main is not empty any more
            elif not busy(slot):
                chosen = slot
                break
        for slot in promoted:
            entry = self._small.pop(slot)
            entry.small, entry.uses = False, 0
            self._main[slot] = entry
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
