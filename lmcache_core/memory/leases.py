"""Owned rights to memory: reservations, leases, and the process that may hold them.

Every right names its owner; there are no bare counters. What a pool counts per value is derived from these objects
and compared with them by ``Pool.check``.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import overload

from lmcache_core.memory.arena import Arena
from lmcache_core.memory.index import Index
from lmcache_core.memory.slabs import Slab
from lmcache_core.spi.buffers import Extent
from lmcache_core.spi.keys import Key


class State(IntEnum):
    """What an extent is in use for; a place in ``Ledger.sums``."""

    CLEAN = 0
    DIRTY = 1
    RESERVED = 2
    QUARANTINED = 3
    DONE = 4
    """Of a ``Held``: it has ended."""


@dataclass(slots=True, eq=False, repr=False)
class Held:
    """Memory promised to one writer (``spi.Reservation``)."""

    arena: Arena
    key: Key
    nbytes: int
    slab: Slab
    position: int
    owner: object
    state: State
    tenant: str = ""
    cost: float = 1.0
    fingerprint: int = 0

    @property
    def extent(self) -> Extent:
        """Where the bytes lie; stays valid until ``commit`` or ``abort``."""
        return _extent(self.arena, self.slab, self.position, self.nbytes)

    @property
    def view(self) -> memoryview:
        """Writable bytes, exactly as many as were asked for.

        Raises:
            ValueError: the reservation has ended.
        """
        if self.state is State.DONE:
            raise ValueError(f"reservation of {self.key!r} has ended")
        base = self.slab.base + self.position * self.slab.size
        return self.arena.view(self.slab.segment, base, self.nbytes)

    def __repr__(self) -> str:
        return f"Held({self.key!r}, {self.nbytes} bytes, {self.state.name.lower()})"


@dataclass(slots=True, eq=False, repr=False)
class Loan:
    """Right to read one value in place (``spi.Lease``): one item of ``Leases``."""

    batch: Leases
    position: int

    @property
    def key(self) -> Key:
        return self.batch.keys[self.position]

    @property
    def owner(self) -> object:
        return self.batch.owner

    @property
    def held(self) -> bool:
        """False once it was released."""
        return self.batch.slots[self.position] >= 0

    @property
    def extent(self) -> Extent:
        slot, index = self._slot(), self.batch.columns
        place = index.places[slot], index.positions[slot]
        return _extent(self.batch.arena, *place, index.nbytes[slot])

    @property
    def identity(self) -> bytes:
        return self.batch.columns.identity(self._slot())

    @property
    def view(self) -> memoryview:
        """Read-only bytes of the value.

        Raises:
            ValueError: the lease has ended (also ``extent`` and ``identity``).
        """
        slot, index = self._slot(), self.batch.columns
        slab = index.places[slot]
        base = slab.base + index.positions[slot] * slab.size
        return self.batch.arena.view(slab.segment, base, index.nbytes[slot]).toreadonly()

    def _slot(self) -> int:
        slot = self.batch.slots[self.position]
        if slot < 0:
            raise ValueError(f"lease of {self.key!r} has ended")
        return slot

    def __repr__(self) -> str:
        return f"Loan({self.key!r}, {'held' if self.held else 'ended'})"


@dataclass(slots=True, eq=False, repr=False)
class Leases(Sequence["Loan | None"]):
    """Leases granted together, None where there was nothing; items are made when asked for.

    ``slots`` names the record of each item, -1 for a miss and for what was released; ``left`` are held.
    """

    columns: Index
    arena: Arena
    keys: Sequence[Key]
    slots: list[int]
    owner: object
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = len(self.slots) - self.slots.count(-1)

    def __len__(self) -> int:
        return len(self.slots)

    @overload
    def __getitem__(self, at: int, /) -> Loan | None: ...
    @overload
    def __getitem__(self, at: slice, /) -> list[Loan | None]: ...
    def __getitem__(self, at: int | slice, /) -> Loan | list[Loan | None] | None:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self.slots)))]
        slot = self.slots[at]
        return Loan(self, at % len(self.slots)) if slot >= 0 else None

    def leading(self) -> int:
        """How many items from the start on are leased: the length of the hit."""
        return self.slots.index(-1) if -1 in self.slots else len(self.slots)


class OwnerProcess:
    """A client process as an owner: ``gone`` is the proof that ``Pool.close_owner`` asks for.

    Args:
        pidfd: from ``os.pidfd_open`` or sent by the client itself; closed by ``close``.

    Raises:
        ValueError: any other descriptor, which would be readable while the process lives.
    """

    __slots__ = ("_pidfd", "_poll", "name")

    def __init__(self, pidfd: int, name: str = "") -> None:
        if "[pidfd" not in os.readlink(f"/proc/self/fd/{pidfd}"):
            raise ValueError(f"descriptor {pidfd} of {name or 'an owner'} is not a pidfd")
        self._pidfd = pidfd
        self.name = name
        self._poll: select.poll | None = select.poll()
        self._poll.register(pidfd, select.POLLIN)

    def fileno(self) -> int:
        """Readable when the process has ended; for ``select`` and event loops."""
        return self._pidfd

    def gone(self) -> bool:
        """Whether the process has ended: stopped or disconnected is not gone, nor is a lost descriptor."""
        return self._poll is None or any(events & select.POLLIN for _, events in self._poll.poll(0))

    def close(self) -> None:
        """Give the descriptor back once the process is gone; idempotent."""
        if self.gone():
            self.discard()

    def discard(self) -> None:
        """Give the descriptor back although the process lives: it holds nothing any more. Idempotent."""
        if self._poll is not None:
            self._poll = None
            os.close(self._pidfd)

    def __repr__(self) -> str:
        return f"OwnerProcess({self.name or self._pidfd})"


def _extent(arena: Arena, slab: Slab, position: int, nbytes: int) -> Extent:
    base = slab.base + position * slab.size
    return Extent(slab.segment, base, nbytes, arena.segments[slab.segment].generation(base))
