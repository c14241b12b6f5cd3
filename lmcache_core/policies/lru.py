"""Least recently used first, leaves before roots: the default.

Paper: P. J. Denning, The working set model for program behavior, CACM 11(5), 1968. The off-switch
    measures as in
C. Waldspurger et al., Cache modeling and optimization using miniature simulations, USENIX ATC 2017.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from lmcache_core.spi.policy import EvictionPolicy

SAMPLED = 16
"""One value in so many takes part in the miniature simulations."""
WINDOW = 256
"""Sampled uses between two comparisons."""
MARGIN = 1.02
"""Hints are heeded while they save so much."""
_NONE = -1
_GROWTH = 256


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
    without hints, see a sample of all uses from the first hint on; while the one with hints misses
    more, hints have no effect. 16 bytes a value, and 8 more where there are hints.
    """

    config_type = LRUConfig

    def __init__(self, config: LRUConfig, capacity: int, /) -> None:
        self._hints = config.hints
        self._order = _Order()
        self._lists = _Lists(capacity, config.expected_share, self._order)
        small, share = capacity // SAMPLED, config.expected_share
        self._plain, self._hinted = _Miniature(small, share), _Miniature(small, share)
        self._sample: dict[int, int] = {}
        self._hinted_ever = False
        self._uses = 0
        self.heeding = True

    def insert(self, slot: int, fingerprint: int, nbytes: int, cost: float, /) -> None:
        self._order[slot] = nbytes
        if self._hinted_ever and fingerprint % SAMPLED == 0:
            self._sample[slot] = fingerprint
            self._measure(slot)

    def touch(self, slots: Sequence[int], /) -> None:
        if not self._hinted_ever:
            self._order.touch(slots)
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
                self._hinted.hint(self._sample[slot])
            if self.heeding:
                self._lists.expect(slot)

    def victim(self, busy: Callable[[int], bool], /) -> int | None:
        for order in self._lists.leaving():  # written out: this is the default policy's hot path
            for slot in order:
                if not busy(slot):
                    return slot
        return None

    def remove(self, slot: int, /, *, evicted: bool = False) -> None:
        self._lists.drop(slot)
        self._sample.pop(slot, None)

    def check(self) -> None:
        self._lists.check()
        self._order.check()
        held = {*self._order, *self._lists.expected}
        assert self._sample.keys() <= held, "a sampled slot is not held"
        assert self.heeding or not self._lists.expected, "hints are off but kept"
        self._plain.check()
        self._hinted.check()

    def _measure(self, slot: int) -> None:
        """Show a sampled use to both miniatures; now and then compare them."""
        for miniature in (self._plain, self._hinted):
            miniature.see(self._sample[slot], self._lists.nbytes(slot))
        self._uses += 1
        if self._uses % WINDOW == 0:
            self.heeding = self._hinted.misses * MARGIN < self._plain.misses
            for miniature in (self._plain, self._hinted):
                miniature.misses -= miniature.misses // 4  # old windows fade
            if not self.heeding:
                self._lists.forget()


class _Order:
    """Slots in order of use with their bytes: the part of ``OrderedDict`` that is used here, in columns.

    A slot knows its neighbours, so that slots that lie together move together.
    """

    __slots__ = ("_nbytes", "_newer", "_older", "_oldest", "_youngest")

    def __init__(self) -> None:
        self._older, self._newer = array("i"), array("i")
        self._nbytes = array("q")  # _NONE for slots not in it
        self._oldest = self._youngest = _NONE

    def __iter__(self) -> Iterator[int]:
        slot = self._oldest
        while slot >= 0:
            yield slot
            slot = self._newer[slot]

    def __contains__(self, slot: int) -> bool:
        return slot < len(self._nbytes) and self._nbytes[slot] >= 0

    def __getitem__(self, slot: int) -> int:
        return self._nbytes[slot]

    def __setitem__(self, slot: int, nbytes: int) -> None:
        """Take in an absent slot as the youngest."""
        if slot >= len(self._nbytes):
            for column in (self._older, self._newer, self._nbytes):
                column.extend([_NONE] * (slot + _GROWTH - len(column)))
        youngest = self._youngest
        self._nbytes[slot] = nbytes
        self._older[slot] = youngest
        self._newer[slot] = _NONE
        if youngest < 0:
            self._oldest = slot
        else:
            self._newer[youngest] = slot
        self._youngest = slot

    def update(self, others: Mapping[int, int]) -> None:
        for slot, nbytes in others.items():
            self[slot] = nbytes

    def pop(self, slot: int, default: None) -> int | None:
        if slot not in self:
            return default
        nbytes, before, after = self._nbytes[slot], self._older[slot], self._newer[slot]
        self._nbytes[slot] = _NONE
        if before < 0:
            self._oldest = after
        else:
            self._newer[before] = after
        if after < 0:
            self._youngest = before
        else:
            self._older[after] = before
        return nbytes

    def move_to_end(self, slot: int) -> None:
        self._move(slot, slot)

    def touch(self, slots: Sequence[int]) -> None:
        newer, slots = self._newer, [*slots]
        if not slots:
            return
        first, last = slots[0], slots[-1]
        if [*map(newer.__getitem__, slots[:-1])] != slots[1:]:  # not one prefix, as last time
            last = first
            for slot in slots[1:]:
                if newer[last] != slot:
                    self._move(first, last)
                    first = slot
                last = slot
        self._move(first, last)

    def check(self) -> None:
        slots = [*self]
        assert slots == [slot for slot in slots if slot in self], "an absent slot is in the order"
        assert len(slots) == sum(n >= 0 for n in self._nbytes), "a slot has no place in the order"
        before = [_NONE, *slots]
        assert [self._older[slot] for slot in slots] == before[:-1], "neighbours disagree"
        assert self._youngest == before[-1], "the youngest is not the last"

    def _move(self, first: int, last: int) -> None:
        """Make neighbours the youngest."""
        youngest = self._youngest
        if last == youngest:
            return
        older, newer = self._older, self._newer
        before, after = older[first], newer[last]
        if before < 0:
            self._oldest = after
        else:
            newer[before] = after
        older[after] = before
        newer[youngest] = first
        older[first] = youngest
        newer[last] = _NONE
        self._youngest = last


class _Lists:
    """Names in order of use, with their bytes: those nobody expects, and those someone does."""

    __slots__ = ("capacity", "expected", "expected_nbytes", "order", "room")

    def __init__(self, capacity: int, share: float, order: _Order | OrderedDict[int, int]) -> None:
        self.order = order
        self.expected: OrderedDict[int, int] = OrderedDict()
        self.expected_nbytes = 0
        self.capacity = capacity
        self.room = share * capacity

    def use(self, name: int) -> None:
        self.order[name] = self.drop(name)

    def expect(self, name: int) -> None:
        self.expected[name] = nbytes = self.drop(name)
        self.expected_nbytes += nbytes

    def nbytes(self, name: int) -> int:
        return self.order[name] if name in self.order else self.expected[name]

    def leaving(self) -> tuple[Iterable[int], Iterable[int]]:
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
        assert not any(name in self.order for name in self.expected), "a value is in both lists"
        assert self.expected_nbytes == sum(self.expected.values()), "expected bytes are miscounted"


class _Miniature(_Lists):
    """A small cache of fingerprints under the same rule; only its misses are of interest."""

    __slots__ = ("misses", "used")

    def __init__(self, capacity: int, share: float) -> None:
        super().__init__(capacity, share, OrderedDict())
        self.misses = self.used = 0

    def see(self, fingerprint: int, nbytes: int) -> None:
        if fingerprint in self.order or fingerprint in self.expected:
            self.use(fingerprint)
            return
        self.misses += 1
        self.order[fingerprint] = nbytes
        self.used += nbytes
        while self.used > self.capacity:
            self.used -= self.drop(next(chain.from_iterable(self.leaving())))

    def hint(self, fingerprint: int) -> None:
        if fingerprint in self.order or fingerprint in self.expected:
            self.expect(fingerprint)

    def check(self) -> None:
        super().check()
        held = sum(map(self.nbytes, self.order)) + self.expected_nbytes
        assert held == self.used <= self.capacity, "a miniature miscounts its bytes"
