"""What policies share: queues that know their bytes, and which touches are no reuse.

The touch that ends an insertion is a *correlated reference* in the words of E. O'Neil, P. O'Neil,
G. Weikum, The LRU-K page replacement algorithm for database disk buffering, SIGMOD 1993.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lmcache_core.spi.policy import EvictionPolicy

PERIOD = 512
"""Insertions after which even the first touch is a reuse."""


@dataclass(frozen=True, slots=True)
class NoKnobs:
    """No knobs."""


class Fresh(OrderedDict[int, None]):
    """Slots inserted lately and not touched since."""

    def add(self, slot: int) -> None:
        """Note an insertion; the oldest of too many is fresh no more."""
        self[slot] = None
        if len(self) > PERIOD:
            self.popitem(last=False)

    def end(self, slot: int) -> bool:
        """Whether the slot was fresh; it is not any longer."""
        if slot in self:
            del self[slot]
            return True
        return False


@dataclass(slots=True)
class Entry:
    """A value in a queue, or what a ghost remembers of it."""

    fingerprint: int
    nbytes: int
    uses: int = 0


class Queue(OrderedDict[int, Entry]):
    """Slots (or fingerprints of gone values) in order, and the bytes of all."""

    nbytes = 0

    def add(self, name: int, entry: Entry) -> None:
        """Append; a name that is there already is replaced."""
        self.drop(name)
        self[name] = entry
        self.nbytes += entry.nbytes

    def drop(self, name: int) -> bool:
        """Forget a name; whether it was there."""
        if name not in self:
            return False
        self.nbytes -= self.pop(name).nbytes
        return True

    def move(self, name: int, into: Queue) -> None:
        """Hand an entry to the end of another queue."""
        entry = self[name]
        self.drop(name)
        into.add(name, entry)

    def trim(self, room: float) -> None:
        """Drop the oldest until the rest fits."""
        while self and self.nbytes > room:
            self.drop(next(iter(self)))


class QueuePolicy(EvictionPolicy):
    """Base of policies that keep every slot in one of several queues."""

    def __init__(self, *queues: Queue) -> None:
        self._queues = queues
        self._fresh = Fresh()

    def _holding(self, slot: int) -> Queue:
        for queue in self._queues:
            if slot in queue:
                return queue
        raise KeyError(slot)

    def _take(self, slot: int) -> tuple[Queue, Entry]:
        """Forget a slot; the queue that held it, and its entry."""
        self._fresh.end(slot)
        queue = self._holding(slot)
        entry = queue[slot]
        queue.drop(slot)
        return queue, entry

    def check(self) -> None:
        held = {slot for queue in self._queues for slot in queue}
        assert len(held) == sum(map(len, self._queues)), "a slot is in two queues"
        assert self._fresh.keys() <= held, "a fresh slot is not held"
        miscounted(self._queues)


def miscounted(queues: Iterable[Queue], /) -> None:
    """Assert that queues know their bytes."""
    for queue in queues:
        assert queue.nbytes == sum(e.nbytes for e in queue.values()), "a queue miscounts its bytes"


def first_idle(busy: Callable[[int], bool], /, *queues: Iterable[int]) -> int | None:
    """The first slot of these queues, taken in turn, that is not busy."""
    for queue in queues:
        for slot in queue:
            if not busy(slot):
                return slot
    return None
