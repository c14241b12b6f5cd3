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


MARGIN = 1.02
"""Hints are heeded while they save so much."""


@dataclass(frozen=True, slots=True)
class LRUConfig:
    """Knobs.

    Attributes:
        hints: heed hints "will return" as long as they are measured to help.
        expected_share: part of the capacity in which hinted values outlast unhinted ones.
    """

    hints: bool = True
    expected_share: float = 0.5


class LRU(EvictionPolicy):
    """The value not used for the longest time leaves first; values someone expects again leave
    last.

    Insertion order: as most recent; the touch from leaf to root that follows makes roots younger
    than leaves. Deviations: hinted values are a list of their own until used, and leave only when
    that list is over its share or nothing else is left. Two miniature caches, one with and one
    without hints, see a sample of all uses; while the one with hints misses more, hints have no
    effect. 91 bytes a value, and 10 more for the sample.
    """

    config_type = LRUConfig

    def __init__(self, config: LRUConfig, capacity: int, /) -> None:
        self._hints = config.hints
        self._lists = _Lists(capacity, config.expected_share)
        small, share = capacity // SAMPLED, config.expected_share
        self._plain, self._hinted = _Miniature(small, share), _Miniature(small, share)
        self._sample: dict[int, tuple[int, int]] = {}
        self._hinted_ever = False
        self._uses = 0
        self.heeding = True

    def insert(self, slot: int, fingerprint: int, nbytes: int, cost: float, /) -> None:
        self._lists.order[slot] = nbytes
        if self._hints and fingerprint % SAMPLED == 0:
            self._sample[slot] = (fingerprint, nbytes)
            self._measure(slot)

    def touch(self, slots: Sequence[int], /) -> None:
        if not self._hinted_ever:
            deque(map(self._lists.order.move_to_end, slots), maxlen=0)
            return
        for slot in slots:
            self._lists.use(slot)
            if slot in self._sample:
                self._measure(slot)

    def hint(self, slots: Sequence[int], /) -> None:
        if not self._hints:
            return
        self._hinted_ever = True
        for slot in slots:
            if slot in self._sample:
                self._hinted.hint(self._sample[slot][0])
            if self.heeding:
                self._lists.expect(slot)

    def victim(self, busy: Callable[[int], bool], /) -> int | None:
        for order in self._lists.leaving():
            for slot in order:
                if not busy(slot):
                    return slot
        return None

    def remove(self, slot: int, /, *, evicted: bool = False) -> None:
        self._lists.drop(slot)
        self._sample.pop(slot, None)

    def check(self) -> None:
        self._lists.check()
        held = self._lists.order.keys() | self._lists.expected.keys()
        assert self._sample.keys() <= held, "a sampled slot is not held"
        assert self.heeding or not self._lists.expected, "hints are off but kept"
        self._plain.check()
        self._hinted.check()

    def _measure(self, slot: int) -> None:
        """Show a sampled use to both miniatures; now and then compare them."""
        if not self._hinted_ever:
            return
        for miniature in (self._plain, self._hinted):
            miniature.see(*self._sample[slot])
        self._uses += 1
        if self._uses % WINDOW == 0:
            self.heeding = self._hinted.misses * MARGIN < self._plain.misses
            for miniature in (self._plain, self._hinted):
                miniature.misses -= miniature.misses // 4  # old windows fade
            if not self.heeding:
                self._lists.forget()


class _Lists:
    """Names in order of use, with their bytes: those nobody expects, and those someone does."""

    __slots__ = ("capacity", "expected", "expected_nbytes", "order", "room")

    def __init__(self, capacity: int, share: float) -> None:
        self.order: OrderedDict[int, int] = OrderedDict()
        self.expected: OrderedDict[int, int] = OrderedDict()
        self.expected_nbytes = 0
        self.capacity = capacity
        self.room = share * capacity

    def use(self, name: int) -> None:
        nbytes = self.expected.pop(name, None)
        if nbytes is None:
            self.order.move_to_end(name)
        else:
            self.expected_nbytes -= nbytes
            self.order[name] = nbytes

    def expect(self, name: int) -> None:
        nbytes = self.order.pop(name, None)
        if nbytes is None:
            self.expected.move_to_end(name)
        else:
            self.expected[name] = nbytes
            self.expected_nbytes += nbytes

    def leaving(self) -> tuple[OrderedDict[int, int], OrderedDict[int, int]]:
        """Both lists, the one to take from first."""
        if self.expected_nbytes > self.room:
            return self.expected, self.order
        return self.order, self.expected

    def drop(self, name: int) -> int:
        nbytes = self.order.pop(name, None)
        if nbytes is None:
            nbytes = self.expected.pop(name)
            self.expected_nbytes -= nbytes
        return nbytes

    def forget(self) -> None:
        """Expect nothing any more: what was expected counts as just used."""
        self.order.update(self.expected)
        self.expected.clear()
        self.expected_nbytes = 0

    def check(self) -> None:
        assert not self.order.keys() & self.expected.keys(), "a value is in both lists"
        assert self.expected_nbytes == sum(self.expected.values()), "expected bytes are miscounted"


class _Miniature(_Lists):
    """A small cache of fingerprints under the same rule; only its misses are of interest."""

    __slots__ = ("misses", "used")

    def __init__(self, capacity: int, share: float) -> None:
        super().__init__(capacity, share)
        self.misses = self.used = 0

    def see(self, fingerprint: int, nbytes: int) -> None:
        if fingerprint in self.order or fingerprint in self.expected:
            self.use(fingerprint)
            return
        self.misses += 1
        self.order[fingerprint] = nbytes
        self.used += nbytes
        while self.used > self.capacity:
            first, second = self.leaving()
            self.used -= self.drop(next(iter(first or second)))

    def hint(self, fingerprint: int) -> None:
        if fingerprint in self.order or fingerprint in self.expected:
            self.expect(fingerprint)

    def check(self) -> None:
        super().check()
        held = sum(self.order.values()) + self.expected_nbytes
        assert held == self.used <= self.capacity, "a miniature miscounts its bytes"
