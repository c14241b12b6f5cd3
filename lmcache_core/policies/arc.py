"""Adaptive replacement: splits room between values used once and values used again.

Paper: N. Megiddo, D. S. Modha, ARC: a self-tuning, low overhead replacement cache, USENIX FAST
    2003.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmcache_core.policies.queues import Entry, NoKnobs, Queue, QueuePolicy, first_idle, miscounted


class ARC(QueuePolicy):
    """Lists T1 (used once), T2 (used again) and their ghosts B1, B2, as named in the paper.

    Insertion order: most recent of T1, or of T2 when a ghost remembers the value.
    Deviations: sizes are bytes; the target of T1 moves when a value returns, which is after room
        was made for it;
    the tie-break of REPLACE for values in B2 is left out for the same reason.
    """

    config_type = NoKnobs

    def __init__(self, config: NoKnobs, capacity: int, /) -> None:
        self._capacity = capacity
        self._once, self._again = Queue(), Queue()
        self._ghosts_once, self._ghosts_again = Queue(), Queue()
        self._target = 0.0
        super().__init__(self._once, self._again)

    def insert(self, slot: int, fingerprint: int, nbytes: int, cost: float, /) -> None:
        into = self._again
        once, again = self._ghosts_once.nbytes, self._ghosts_again.nbytes
        if self._ghosts_once.drop(fingerprint):
            step = nbytes * max(1.0, again / max(1, once))
            self._target = min(float(self._capacity), self._target + step)
        elif self._ghosts_again.drop(fingerprint):
            step = nbytes * max(1.0, once / max(1, again))
            self._target = max(0.0, self._target - step)
        else:
            into = self._once
        into.add(slot, Entry(fingerprint, nbytes))
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
                once.move(slot, again)

    def victim(self, busy: Callable[[int], bool], /) -> int | None:
        if self._once.nbytes > self._target:
            return first_idle(busy, self._once, self._again)
        return first_idle(busy, self._again, self._once)

    def remove(self, slot: int, /, *, evicted: bool = False) -> None:
        queue, entry = self._take(slot)
        if evicted:
            self._ghosts_once.drop(entry.fingerprint)
            self._ghosts_again.drop(entry.fingerprint)
            ghosts = self._ghosts_once if queue is self._once else self._ghosts_again
            ghosts.add(entry.fingerprint, entry)
            self._trim()

    def check(self) -> None:
        super().check()
        miscounted((self._ghosts_once, self._ghosts_again))
        assert not self._ghosts_once.keys() & self._ghosts_again.keys(), "a ghost is in B1 and B2"
        assert 0 <= self._target <= self._capacity, "the target is outside the cache"
        ghosts = self._ghosts_once.nbytes
        assert not ghosts or self._once.nbytes + ghosts <= self._capacity, "T1 and B1 are too long"

    def _trim(self) -> None:
        """|T1| + |B1| <= c and all four lists <= 2c."""
        self._ghosts_once.trim(self._capacity - self._once.nbytes)
        held = self._once.nbytes + self._again.nbytes + self._ghosts_once.nbytes
        self._ghosts_again.trim(2 * self._capacity - held)
