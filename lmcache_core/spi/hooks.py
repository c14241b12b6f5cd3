"""Events that observers may watch. One event per batch, never per key; an observer cannot alter anything.

An observer is any object with ``observe(event)``, named in configuration and found in the entry-point
group ``lmcache_core.observers``. One that raises is disabled and logged once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened in a tier."""

    tier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOpened(Event):
    """A tier serves from now on."""

    plugin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TierClosed(Event):
    """A tier serves no more; ``quarantined`` bytes were still in flight."""

    quarantined: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDone(Event):
    """One verb on one batch ended.

    Attributes:
        verb: ``lookup``, ``load``, ``store`` or ``delete``.
        asked, good, missed, failed: items; ``asked = good + missed + failed``.
        nbytes: payload bytes of the good items.
        seconds: duration.
    """

    verb: str
    asked: int
    good: int
    missed: int
    failed: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted(Event):
    """Values left because room was needed."""

    count: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthChanged(Event):
    """A tier's breaker opened, half-opened or closed."""

    state: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Damaged(Event):
    """A value failed verification; it was served as a miss and is being removed."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recoded(Event):
    """Values of one batch went through the serdes of a tier.

    Attributes:
        verb: ``store`` (encoded) or ``load`` (decoded).
        chain: wire ids configured, joined by ``+``; of a ladder ``ladder``, and ``ladder.LEVEL`` for loads.
        values: how many were not plain frames inside.
        raw, stored: their bytes before encoding, and as stored.
        seconds: time on the tier's threads, digests included.
    """

    verb: str
    chain: str
    values: int
    raw: int
    stored: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SerdeOff(Event):
    """A serde failed its test at start; values are stored without it."""

    serde: str
    reason: str


class Observer(Protocol):
    """Watches events; called off the critical path, one at a time."""

    def observe(self, event: Event, /) -> None: ...
