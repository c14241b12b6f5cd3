"""First in, first out: a use changes nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from lmcache_core.policies.queues import NoKnobs, first_idle
from lmcache_core.spi.policy import EvictionPolicy


class FIFO(EvictionPolicy):
    """Leaves in order of insertion.

    Insertion order: at the end. Deviations: none; 91 bytes a value.
    """

    config_type = NoKnobs

    def __init__(self, config: NoKnobs, capacity: int, /) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def insert(self, slot: int, fingerprint: int, nbytes: int, cost: float, /) -> None:
        self._order[slot] = None

    def touch(self, slots: Sequence[int], /) -> None:
        pass

    def victim(self, busy: Callable[[int], bool], /) -> int | None:
        return first_idle(busy, self._order)

    def remove(self, slot: int, /, *, evicted: bool = False) -> None:
        del self._order[slot]

    def check(self) -> None:
        assert all(slot >= 0 for slot in self._order), "a slot is negative"
