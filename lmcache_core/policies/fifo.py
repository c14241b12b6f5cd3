"""First in, first out: a use changes nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache_core.spi.policy import EvictionPolicy


@dataclass(frozen=True, slots=True)
class FIFOConfig:
    """No knobs."""


class FIFO(EvictionPolicy):
    """Leaves in order of insertion.

    Insertion order: at the end. Deviations: none; 91 bytes a value.
    """

    config_type = FIFOConfig

    def __init__(self, config: FIFOConfig, capacity: int, /) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def insert(self, slot: int, fingerprint: int, nbytes: int, cost: float, /) -> None:
        self._order[slot] = None

    def touch(self, slots: Sequence[int], /) -> None:
        pass

    def victim(self, busy: Callable[[int], bool], /) -> int | None:
        return next((slot for slot in self._order if not busy(slot)), None)

    def remove(self, slot: int, /, *, evicted: bool = False) -> None:
        del self._order[slot]

    def check(self) -> None:
        assert all(slot >= 0 for slot in self._order), "a slot is negative"
