"""Adaptive replacement: splits room between values used once and values used again.

Paper: N. Megiddo, D. S. Modha, ARC: a self-tuning, low overhead replacement cache, USENIX FAST
    2003.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache_core.policies.fresh import Fresh
from lmcache_core.spi.policy import EvictionPolicy


@dataclass(frozen=True, slots=True)
class ARCConfig:
    """No knobs."""


class _Queue(OrderedDict[int, tuple[int, int]]):
    """Slots (or fingerprints of gone values) with (fingerprint, bytes), and the bytes of all."""

    nbytes = 0

    def add(self, name: int, value: tuple[int, int]) -> None:
        self[name] = value
        self.nbytes += value[1]

    def take(self, name: int) -> tuple[int, int]:
        value = self.pop(name)
        self.nbytes -= value[1]
        return value

    def trim(self, room: int) -> None:
        while self and self.nbytes > room:
            self.take(next(iter(self)))


class ARC(EvictionPolicy):
    """Lists T1 (used once), T2 (used again) and their ghosts B1, B2, as named in the paper.

    Insertion order: most recent of T1, or of T2 when a ghost remembers the value.
    Deviations: sizes are bytes; the target of T1 moves when a value returns, which is after room
        was made for it;
    the tie-break of REPLACE for values in B2 is left out for the same reason.
    """

    config_type = ARCConfig

    def __init__(self, config: ARCConfig, capacity: int, /) -> None:
        self._capacity = capacity
        self._once, self._again = _Queue(), _Queue()
        self._ghosts_once, self._ghosts_again = _Queue(), _Queue()
        self._target = 0.0
        self._fresh = Fresh()

    def insert(self, slot: int, fingerprint: int, nbytes: int, cost: float, /) -> None:
        into = self._once
        once, again = self._ghosts_once.nbytes, self._ghosts_again.nbytes
        if fingerprint in self._ghosts_once:
            step = nbytes * max(1.0, again / max(1, once))
            self._target = min(float(self._capacity), self._target + step)
            self._ghosts_once.take(fingerprint)
            into = self._again
        elif fingerprint in self._ghosts_again:
            step = nbytes * max(1.0, once / max(1, again))
            self._target = max(0.0, self._target - step)
            self._ghosts_again.take(fingerprint)
            into = self._again
        into.add(slot, (fingerprint, nbytes))
        self._fresh.add(slot)
        self._trim()

    def touch(self, slots: Sequence[int], /) -> None:
        once, again, fresh = self._once, self._again, self._fresh
        for slot in slots:
            if slot in again:
                again.move_to_end(slot)
                fresh.end(slot)
            elif fresh.end(slot):
                once.move_to_end(slot)
            else:
                again.add(slot, once.take(slot))

    def victim(self, busy: Callable[[int], bool], /) -> int | None:
        first, second = self._again, self._once
        if self._once.nbytes > self._target:
            first, second = second, first
        for queue in (first, second):
            for slot in queue:
                if not busy(slot):
                    return slot
        return None

    def remove(self, slot: int, /, *, evicted: bool = False) -> None:
        self._fresh.end(slot)
        queue, ghosts = self._once, self._ghosts_once
        if slot in self._again:
            queue, ghosts = self._again, self._ghosts_again
        fingerprint, nbytes = queue.take(slot)
        if evicted:
            for each in (self._ghosts_once, self._ghosts_again):
                if fingerprint in each:
                    each.take(fingerprint)
            ghosts.add(fingerprint, (fingerprint, nbytes))
            self._trim()

    def check(self) -> None:
        assert not self._once.keys() & self._again.keys(), "a slot is in T1 and T2"
        assert not self._ghosts_once.keys() & self._ghosts_again.keys(), "a ghost is in B1 and B2"
        for queue in (self._once, self._again, self._ghosts_once, self._ghosts_again):
            assert queue.nbytes == sum(n for _, n in queue.values()), "a list miscounts its bytes"
        assert 0 <= self._target <= self._capacity, "the target is outside the cache"
        ghosts = self._ghosts_once.nbytes
        assert not ghosts or self._once.nbytes + ghosts <= self._capacity, "T1 and B1 are too long"
        assert self._fresh.keys() <= self._once.keys() | self._again.keys(), (
            "a fresh slot is not held"
        )

    def _trim(self) -> None:
        """|T1| + |B1| <= c and all four lists <= 2c."""
        self._ghosts_once.trim(self._capacity - self._once.nbytes)
        held = self._once.nbytes + self._again.nbytes + self._ghosts_once.nbytes
        self._ghosts_again.trim(2 * self._capacity - held)
