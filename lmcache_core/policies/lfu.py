"""Least frequently used first, in constant time.

Paper: K. Shah, A. Mitra, D. Matani, An O(1) algorithm for implementing the LFU cache eviction
    scheme, 2010.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache_core.policies.queues import Fresh, first_idle
from lmcache_core.spi.policy import EvictionPolicy


@dataclass(frozen=True, slots=True)
class LFUConfig:
    """Knobs.

    Attributes:
        ceiling: uses are counted up to this, 1 to 255.
        fade: after so many insertions per held value all counts are halved; 0 for never.
    """

    ceiling: int = 15
    fade: int = 1


class LFU(EvictionPolicy):
    """The value with the fewest uses leaves first; among equals the one not used for the longest
    time.

    Insertion order: as most recent of those used once. Deviations: counts end at a ceiling, so that
    one row of lists replaces the paper's linked list; counts fade, or values popular long ago would
    stay for ever.
    """

    config_type = LFUConfig

    def __init__(self, config: LFUConfig, capacity: int, /) -> None:
        self._ceiling, self._fade = config.ceiling, config.fade
        self._rows: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(config.ceiling)]
        self._uses: dict[int, int] = {}
        self._fresh = Fresh()
        self._inserted = 0

    def insert(self, slot: int, fingerprint: int, nbytes: int, cost: float, /) -> None:
        self._inserted += 1
        if self._fade and self._inserted > self._fade * len(self._uses) + self._fade:
            self._inserted = 0
            self._halve()
        self._uses[slot] = 1
        self._rows[0][slot] = None
        self._fresh.add(slot)

    def touch(self, slots: Sequence[int], /) -> None:
        uses, rows = self._uses, self._rows
        for slot in slots:
            count = uses[slot]
            if self._fresh.end(slot) or count == self._ceiling:
                rows[count - 1].move_to_end(slot)
            else:
                del rows[count - 1][slot]
                rows[count][slot] = None
                uses[slot] = count + 1

    def victim(self, busy: Callable[[int], bool], /) -> int | None:
        return first_idle(busy, *self._rows)

    def remove(self, slot: int, /, *, evicted: bool = False) -> None:
        del self._rows[self._uses.pop(slot) - 1][slot]
        self._fresh.end(slot)

    def check(self) -> None:
        assert sum(map(len, self._rows)) == len(self._uses), "a slot is in two rows or in none"
        for slot, count in self._uses.items():
            assert slot in self._rows[count - 1], "a slot is in the row of another count"
        assert self._fresh.keys() <= self._uses.keys(), "a fresh slot is not held"

    def _halve(self) -> None:
        """One pass over all values; amortised over as many insertions it is constant per call."""
        old = self._rows
        self._rows = [OrderedDict() for _ in old]
        for index, row in enumerate(old):
            count = max(1, (index + 1) // 2)
            self._rows[count - 1].update(row)
            self._uses.update(dict.fromkeys(row, count))
