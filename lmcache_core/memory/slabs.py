"""Where extents lie: exact sizes in slabs of equal extents, slabs in runs of free memory.

A *class* is one extent size, a multiple of 4 KiB. A *slab* is a run of extents of one class and holds nothing
else, so it has no tail; the first slab of a class has one extent and later ones double up to ``slab_nbytes``, so
that a rare size costs one extent. A slab whose last extent comes back dissolves at once and its run joins its free
neighbours. What is left is measured as ``stranded`` and undone by ``window``: the pool empties the cheapest row of
neighbouring slabs. (Slab allocation after Bonwick, USENIX 1994; here with dissolving slabs.)
Pure bookkeeping: no memory is touched. Not thread-safe.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from operator import attrgetter, itemgetter

FREE = -1
"""In ``Slab.users``: nobody."""
HELD = -2
"""In ``Slab.users``: reserved or quarantined; cannot be moved."""


class Slab:
    """Extents of one size, side by side.

    Attributes:
        segment, base: where it begins.
        size: bytes of one extent.
        users: for each extent the slot of its value, ``FREE`` or ``HELD``.
        free: positions of free extents.
    """

    __slots__ = ("base", "free", "segment", "size", "users")

    def __init__(self, segment: int, base: int, size: int, count: int) -> None:
        self.segment = segment
        self.base = base
        self.size = size
        self.users = array("i", [FREE]) * count
        self.free = list(range(count - 1, -1, -1))

    @property
    def nbytes(self) -> int:
        return self.size * len(self.users)

    @property
    def end(self) -> int:
        return self.base + self.size * len(self.users)

    @property
    def used(self) -> int:
        """Bytes of extents that are not free."""
        return self.size * (len(self.users) - len(self.free))


class Slabs:
    """All extents of a set of segments.

    Args:
        slab_nbytes: a slab grows no larger than this, unless one extent is.

    Attributes:
        free: bytes of free extents and free runs.
        loose: bytes of free runs.
        lost: bytes that ``lose`` took out of use.
    """

    def __init__(self, slab_nbytes: int) -> None:
        self._slab_nbytes = slab_nbytes
        self._runs: dict[int, list[tuple[int, int]]] = {}
        self._slabs: dict[int, list[Slab]] = {}
        self._partial: dict[int, list[Slab]] = {}
        self._counts: dict[int, int] = {}
        self.free = 0
        self.lost = 0
        self.loose = 0

    def add_segment(self, segment: int, nbytes: int) -> None:
        """Put a segment to use."""
        self._runs[segment] = [(0, nbytes)]
        self._slabs[segment] = []
        self.free += nbytes
        self.loose += nbytes

    def take(self, size: int) -> tuple[Slab, int] | None:
        """Take a free extent (slab, position) of an existing slab; None: ``carve`` one first."""
        partial = self._partial.get(size)
        if not partial:
            return None
        slab = partial[-1]
        position = slab.free.pop()
        if not slab.free:
            partial.pop()
        slab.users[position] = HELD
        self.free -= size
        return slab, position

    def give(self, slab: Slab, position: int) -> None:
        """Take an extent back."""
        slab.users[position] = FREE
        slab.free.append(position)
        self.free += slab.size
        if len(slab.free) == 1:
            self._partial.setdefault(slab.size, []).append(slab)
        if len(slab.free) == len(slab.users):
            self._dissolve(slab)

    def carve(self, size: int) -> Slab | None:
        """Make a new slab for a size from the first run that holds it; None: no run does."""
        if self.loose < size:
            return None
        most = max(1, self._slab_nbytes // size)
        count = min(most, max(1, self._counts.get(size, 0)))
        found = self._find(count * size) or (self._find(size) if count > 1 else None)
        if found is None:
            return None
        segment, at = found
        base, length = self._runs[segment][at]
        count = min(count, length // size)
        slab = Slab(segment, base, size, count)
        rest = (base + slab.nbytes, length - slab.nbytes)
        self._runs[segment][at : at + 1] = [rest] if rest[1] else []
        self.loose -= slab.nbytes
        slabs = self._slabs[segment]
        slabs.insert(bisect_left(slabs, base, key=attrgetter("base")), slab)
        self._partial.setdefault(size, []).append(slab)
        self._counts[size] = self._counts.get(size, 0) + count
        return slab

    def lose(self, slab: Slab) -> None:
        """Take a slab just carved out of use for ever: there is no memory behind it."""
        self._forget(slab)
        self.free -= slab.nbytes
        self.lost += slab.nbytes

    def stranded(self, size: int) -> int:
        """Free bytes that cannot serve this size."""
        own = sum(len(slab.free) * size for slab in self._partial.get(size, ()))
        fit = sum(n - n % size for runs in self._runs.values() for _, n in runs)
        return self.free - own - fit

    def sizes(self) -> list[int]:
        """Sizes that have slabs."""
        return list(self._counts)

    def slabs(self) -> Iterator[Slab]:
        """All slabs, by segment and place."""
        for slabs in self._slabs.values():
            yield from slabs

    def window(self, size: int, movable: Callable[[Slab], bool]) -> list[Slab] | None:
        """The neighbouring slabs that make room for ``size`` at the least loss of used bytes.

        Slabs of the size itself are left alone. ``movable`` is asked once for each slab that would be chosen.
        """
        rows = sorted(
            (loss, segment, first, last)
            for segment in self._slabs
            for loss, first, last in self._rows(segment, size)
        )
        pieces = {segment: self._pieces(segment) for segment in self._slabs}
        asked: dict[int, bool] = {}
        for _, segment, first, last in rows:
            row = [slab for _, _, slab in pieces[segment][first : last + 1] if slab is not None]
            for slab in row:
                if id(slab) not in asked:
                    asked[id(slab)] = movable(slab)
                if not asked[id(slab)]:
                    break
            else:
                return row
        return None

    def check(self) -> None:
        """Assert that slabs and runs cover every segment once, and all counts."""
        free = 0
        counts: dict[int, int] = {}
        for segment, runs in self._runs.items():
            pieces = [(base, n, True) for base, n in runs]
            pieces += [(slab.base, slab.nbytes, False) for slab in self._slabs[segment]]
            end, was_run = 0, False
            for base, nbytes, is_run in sorted(pieces):
                assert 0 <= end <= base, f"overlap at {base} of segment {segment}"
                assert not (is_run and was_run and base == end), "free runs not joined"
                end, was_run = base + nbytes, is_run
            free += sum(n for _, n in runs)
            for slab in self._slabs[segment]:
                counts[slab.size] = counts.get(slab.size, 0) + len(slab.users)
                free += len(slab.free) * slab.size
                assert sorted(slab.free) == [i for i, u in enumerate(slab.users) if u == FREE]
                assert len(slab.free) < len(slab.users), "an empty slab has not dissolved"
                listed = slab in self._partial.get(slab.size, ())
                assert listed == bool(slab.free), "partial slabs are not listed"
        loose = sum(n for runs in self._runs.values() for _, n in runs)
        assert loose == self.loose, f"bytes in runs: {loose} counted, {self.loose} kept"
        assert free == self.free, f"free bytes: {free} counted, {self.free} kept"
        assert counts == self._counts, "extents per class"

    def _pieces(self, segment: int) -> list[tuple[int, int, Slab | None]]:
        """Begin and end of all slabs and free runs (None) of a segment, in order."""
        pieces: list[tuple[int, int, Slab | None]] = [
            (base, base + n, None) for base, n in self._runs[segment]
        ]
        pieces += [(slab.base, slab.end, slab) for slab in self._slabs[segment]]
        return sorted(pieces, key=itemgetter(0))

    def _rows(self, segment: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Used bytes, first and last of each shortest row of pieces that holds ``size``."""
        pieces = self._pieces(segment)
        first, loss = 0, 0
        for last, (base, end, slab) in enumerate(pieces):
            if slab is not None and slab.size == size:
                first, loss = last + 1, 0
                continue
            if last > first and pieces[last - 1][1] != base:  # lost memory lies between
                first, loss = last, 0
            loss += slab.used if slab is not None else 0
            while first <= last and end - pieces[first][0] >= size:
                yield loss, first, last
                head = pieces[first][2]
                loss -= head.used if head is not None else 0
                first += 1

    def _find(self, nbytes: int) -> tuple[int, int] | None:
        for segment, runs in self._runs.items():
            for at, (_, length) in enumerate(runs):
                if length >= nbytes:
                    return segment, at
        return None

    def _forget(self, slab: Slab) -> None:
        slabs = self._slabs[slab.segment]
        del slabs[bisect_left(slabs, slab.base, key=attrgetter("base"))]
        partial = self._partial[slab.size]
        partial.remove(slab)
        if not partial:
            del self._partial[slab.size]
        self._counts[slab.size] -= len(slab.users)
        if not self._counts[slab.size]:
            del self._counts[slab.size]

    def _dissolve(self, slab: Slab) -> None:
        self._forget(slab)
        runs = self._runs[slab.segment]
        base, end = slab.base, slab.end
        self.loose += end - base
        at = bisect_left(runs, (base, 0))
        until = at
        if at < len(runs) and runs[at][0] == end:
            end += runs[at][1]
            until += 1
        if at and sum(runs[at - 1]) == base:
            at -= 1
            base = runs[at][0]
        runs[at:until] = [(base, end - base)]
