"""What the storage manager answers. Misses and refusals are values; nothing here is raised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from lmcache_core.spi.buffers import Lease
from lmcache_core.spi.keys import Key


class Reason(Enum):
    """Why a run of chunks ended where it did."""

    COMPLETE = "complete"
    """Every chunk asked for was delivered."""
    MISS = "miss"
    """No tier has the next chunk (or its writer has not committed it yet)."""
    DEADLINE = "deadline"
    """The next chunk was not there in time."""
    DAMAGED = "damaged"
    """The next chunk failed verification; it is being removed."""
    FULL = "full"
    """No memory for the next chunk: everything is leased, dirty or in flight."""
    GATE = "gate"
    """Loading the next chunk costs more than computing it, or its tier is ailing."""
    FAILED = "failed"
    """The tier that has the next chunk reported an error."""
    CANCELLED = "cancelled"
    """The value was deleted, or its tier removed, while it was on its way."""
    CLOSED = "closed"
    """The manager is closing."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value was found.

    Attributes:
        tier: configured name of the first tier, in configuration order, that has it.
        nbytes: length of its frame, header room included.
        promise: False for a hint: the tier may have lost it since.
    """

    tier: str
    nbytes: int
    promise: bool = True


@dataclass(frozen=True, slots=True)
class Lookup:
    """Answer to a lookup, aligned with its keys.

    Attributes:
        places: where each value is; None where it is in no tier that answered.
        unanswered: tiers that were not asked or did not answer in time.
    """

    places: tuple[Place | None, ...]
    unanswered: tuple[str, ...] = ()

    @property
    def leading(self) -> int:
        """How many values from the start on are somewhere."""
        return next((i for i, place in enumerate(self.places) if place is None), len(self.places))


@dataclass(frozen=True, slots=True)
class Loaded:
    """*n* good leading chunks, then the reason.

    Attributes:
        leases: one per delivered chunk, from the first key on; the owner given to ``load`` releases them.
        reason: why there are no more (``COMPLETE`` when all are there).
    """

    leases: Sequence[Lease]
    reason: Reason


class Outcome(Enum):
    """What became of one value handed to ``store``."""

    STORED = "stored"
    PRESENT = "present"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Listing:
    """Part of a listing in no meaningful order; ``after`` continues it, None when it is complete."""

    values: tuple[tuple[Key, int], ...]
    after: str | None


@dataclass(frozen=True, slots=True)
class Flushed:
    """How far a flush came: values and bytes that are still only in memory."""

    values: int = 0
    nbytes: int = 0

    def __bool__(self) -> bool:
        return not self.values


@dataclass(frozen=True, slots=True)
class Shutdown:
    """What closing had to leave behind.

    Attributes:
        quarantined: bytes per tier that a hung call may still touch; their memory is never handed on.
        unwritten: dirty bytes that reached no lower tier.
        errors: tiers that did not close cleanly, and why.
    """

    quarantined: Mapping[str, int] = field(default_factory=dict)
    unwritten: int = 0
    errors: Mapping[str, str] = field(default_factory=dict)
