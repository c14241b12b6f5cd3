"""Eviction policies: who leaves when a tier is full.

A policy is pure bookkeeping: synchronous, deterministic, no clock, no I/O, O(1) per call.
Values are named by *slots*: small dense integers handed out by the index and reused after removal,
so that a policy can keep its state in flat arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from lmcache_core.spi.api import PLUGIN_API


class EvictionPolicy(ABC):
    """Order of departure for one tier.

    The index calls, for a new value: ``admit``, then ``victim``/``remove`` until it fits, then ``insert``.
    Chunks of one prefix are touched from leaf to root, so that roots are the most recent.

    Args:
        config: an instance of ``config_type``.
        capacity: byte limit of the tier; a policy that adapts (ARC, S3-FIFO) sizes itself by it.
    """

    plugin_api: ClassVar[int] = PLUGIN_API
    config_type: ClassVar[type]

    @abstractmethod
    def __init__(self, config: Any, capacity: int, /) -> None: ...

    def admit(self, fingerprint: int, nbytes: int, /) -> bool:
        """Tell whether a value is worth room; called before room is made. Default: always.

        Args:
            fingerprint: 64-bit number drawn from the key, equal for equal keys (for ghost lists and sketches).
            nbytes: bytes that will be charged.
        """
        return True

    @abstractmethod
    def insert(self, slot: int, fingerprint: int, nbytes: int, cost: float, /) -> None:
        """Take over a value that has become resident.

        Args:
            slot: not held by this policy at the moment of the call.
            cost: what recomputing it costs, in any unit that is equal for all values; 1.0 when unknown.
        """

    @abstractmethod
    def touch(self, slots: Sequence[int], /) -> None:
        """Note a use of each slot, in the given order. Every slot is held by this policy."""

    @abstractmethod
    def victim(self, busy: Callable[[int], bool], /) -> int | None:
        """Name the slot that should leave first among those not ``busy``, or None when all are busy.

        Nothing changes: the caller confirms with ``remove(slot, evicted=True)``.
        Skipping a busy slot may cost O(1) each.
        """

    @abstractmethod
    def remove(self, slot: int, /, *, evicted: bool = False) -> None:
        """Forget a slot. ``evicted`` tells pressure (remembered in ghost lists) from deletion."""

    def hint(self, slots: Sequence[int], /) -> None:
        """Note that someone expects these slots to be used again. Default: ignored."""

    @abstractmethod
    def check(self) -> None:
        """Assert the policy's own invariants (AssertionError names the broken one)."""
