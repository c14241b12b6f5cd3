"""Least recently used first, leaves before roots: the default.

Paper: P. J. Denning, The working set model for program behavior, CACM 11(5), 1968. The off-switch
    measures as in
C. Waldspurger et al., Cache modeling and optimization using miniature simulations, USENIX ATC 2017.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache_core.spi.policy import EvictionPolicy

SAMPLED = 16
"""One value in so many takes part in the miniature simulations."""
WINDOW = 256
"""Sampled uses between two comparisons."""


@dataclass(frozen=True, slots=True)
class LRUConfig:
    """Knobs.

    Attributes:
        hints: heed hints "will return" as long as they are measured to help.
    """

    hints: bool = True


class LRU(EvictionPolicy):
    """The value not used for the longest time leaves first; values someone expects again leave
    last.

    Insertion order: as most recent; the touch from leaf to root that follows makes roots younger
    than leaves.
    Deviations: a hinted value is passed over while there is an unhinted one, until it is used or
        its hint is the
    oldest of a cache full of them. Two miniature caches, one with and one without hints, see a
    sample of all uses; while the one with hints misses more, hints have no effect. 91 bytes a value
    (98 with the sample).
    """

    config_type = LRUConfig

    def __init__(self, config: LRUConfig, capacity: int, /) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()
        self._expected: OrderedDict[int, None] = OrderedDict()
        self._hints = config.hints
        self._capacity = capacity
        self._sample: dict[int, tuple[int, int]] = {}
        self._plain: _Miniature | None = None  # both exist from the first hint on
        self._hinted: _Miniature | None = None
        self._uses = 0
        self.heeding = True

    def insert(self, slot: int, fingerprint: int, nbytes: int, cost: float, /) -> None:
        self._order[slot] = None
        if self._hints and fingerprint % SAMPLED == 0:
            self._sample[slot] = (fingerprint, nbytes)
            self._measure(slot)

    def touch(self, slots: Sequence[int], /) -> None:
        if self._plain is None:
            deque(map(self._order.move_to_end, slots), maxlen=0)
            return
        for slot in slots:
            if slot in self._expected:
                del self._expected[slot]
                self._order[slot] = None
            else:
                self._order.move_to_end(slot)
            if slot in self._sample:
                self._measure(slot)

    def hint(self, slots: Sequence[int], /) -> None:
        if not self._hints:
            return
        if self._plain is None or self._hinted is None:
            self._plain = _Miniature(self._capacity // SAMPLED)
            self._hinted = _Miniature(self._capacity // SAMPLED)
        for slot in slots:
            if slot in self._sample:
                self._hinted.hint(self._sample[slot][0])
            if self.heeding:
                self._order.pop(slot, None)
                self._expected[slot] = None
                self._expected.move_to_end(slot)

    def victim(self, busy: Callable[[int], bool], /) -> int | None:
        for order in (self._order, self._expected):
            for slot in order:
                if not busy(slot):
                    return slot
        return None

    def remove(self, slot: int, /, *, evicted: bool = False) -> None:
        if slot in self._order:
            del self._order[slot]
        else:
            del self._expected[slot]
        self._sample.pop(slot, None)

    def check(self) -> None:
        assert not self._order.keys() & self._expected.keys(), "a slot is in both orders"
        held = self._order.keys() | self._expected.keys()
        assert self._sample.keys() <= held, "a sampled slot is not held"
        assert self.heeding or not self._expected, "hints are off but kept"
        for miniature in (self._plain, self._hinted):
            if miniature is not None:
                miniature.check()

    def _measure(self, slot: int) -> None:
        """Show a sampled use to both miniatures; now and then compare them."""
        if self._plain is None or self._hinted is None:
            return
        fingerprint, nbytes = self._sample[slot]
        self._plain.use(fingerprint, nbytes)
        self._hinted.use(fingerprint, nbytes)
        self._uses += 1
        if self._uses % WINDOW == 0:
            self.heeding = self._hinted.misses <= self._plain.misses
            for miniature in (self._plain, self._hinted):
                miniature.misses -= miniature.misses // 4  # old windows fade
            if not self.heeding:
                for each in reversed(self._expected):
                    self._order[each] = None
                    self._order.move_to_end(each, last=False)
                self._expected.clear()


class _Miniature:
    """A small cache of fingerprints that obeys the same rule; only its misses are of interest."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.misses = 0
        self._order: OrderedDict[int, int] = OrderedDict()
        self._expected: OrderedDict[int, int] = OrderedDict()
        self._used = 0

    def use(self, fingerprint: int, nbytes: int) -> None:
        if fingerprint in self._order:
            self._order.move_to_end(fingerprint)
            return
        if fingerprint in self._expected:
            self._order[fingerprint] = self._expected.pop(fingerprint)
            return
        self.misses += 1
        self._order[fingerprint] = nbytes
        self._used += nbytes
        while self._used > self.capacity:
            _, freed = (self._order or self._expected).popitem(last=False)
            self._used -= freed

    def hint(self, fingerprint: int) -> None:
        nbytes = self._order.pop(fingerprint, None)
        if nbytes is not None:
            self._expected[fingerprint] = nbytes

    def check(self) -> None:
        held = sum(self._order.values()) + sum(self._expected.values())
        assert held == self._used <= self.capacity, "a miniature miscounts its bytes"
