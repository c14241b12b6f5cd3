"""Memory that is lent: regions that transports register, and the pool of a resident tier.

Host memory travels as ``memoryview``. A view handed to a plugin is borrowed for one await and no longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from lmcache_core.spi.keys import Key


class MemoryKind(Enum):
    """What a pointer points at."""

    HOST = "host"
    CUDA = "cuda"
    ROCM = "rocm"
    XPU = "xpu"
    HPU = "hpu"
    MUSA = "musa"


@dataclass(frozen=True, slots=True)
class Region:
    """A long-lived piece of memory that a backend may register with its transport.

    Attributes:
        kind: what the pointer points at.
        device: device index, 0 for host memory.
        pointer: start address in this process, aligned to 4096.
        nbytes: length.
        view: the same memory as bytes for ``MemoryKind.HOST``, else None.
    """

    kind: MemoryKind
    device: int
    pointer: int
    nbytes: int
    view: memoryview | None = None


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a value lies in a pool: bytes ``[base, base + nbytes)`` of one segment.

    ``generation`` changes whenever the place is given to another value; a reader in another process compares
    it before and after copying.
    """

    segment: int
    base: int
    nbytes: int
    generation: int


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """How a pool gets its memory.

    Attributes:
        huge_pages: ask the kernel for huge pages; falls back with one line when there are none.
        numa_node: preferred node, or None for the kernel's choice.
        populate: touch pages in the background so that first stores do not pay for it.
    """

    huge_pages: bool = False
    numa_node: int | None = None
    populate: bool = True


class Refusal(Enum):
    """Why a reservation was not granted."""

    PRESENT = "present"
    """A visible value of this key is already there."""
    PENDING = "pending"
    """Another owner is writing this key right now."""
    FULL = "full"
    """No free extent and nothing that may leave."""
    TOO_LARGE = "too large"
    """Larger than the pool will ever hold."""
    UNWANTED = "unwanted"
    """The policy, a quota or a freeze declined it."""


class Reservation(Protocol):
    """Memory promised to one writer. Ends by ``commit`` or ``abort`` of its pool, never by time."""

    @property
    def key(self) -> Key: ...
    @property
    def extent(self) -> Extent: ...
    @property
    def view(self) -> memoryview:
        """Writable bytes of the value, exactly as many as were asked for."""


class Lease(Protocol):
    """Owned right to read one visible value in place. Ends by ``release``; releasing twice is harmless."""

    @property
    def key(self) -> Key: ...
    @property
    def extent(self) -> Extent: ...
    @property
    def identity(self) -> bytes:
        """16-byte digest given at commit."""

    @property
    def view(self) -> memoryview:
        """Read-only bytes of the value; valid until release."""


class ResidentPool(Protocol):
    """Values in memory that are read and written in place. Thread-safe; no call waits for memory or I/O."""

    @property
    def capacity(self) -> int: ...

    def reserve(
        self, wants: Sequence[tuple[Key, int]], owner: object, /
    ) -> Sequence[Reservation | Refusal]:
        """Promise memory for values of the given lengths, evicting if that helps; grants in order."""

    def commit(self, reservation: Reservation, identity: bytes, /) -> bool:
        """Make a filled value visible. False: the reservation was aborted meanwhile."""

    def abort(self, reservation: Reservation, /) -> None:
        """Give the memory back; idempotent."""

    def lease(self, keys: Sequence[Key], owner: object, /) -> Sequence[Lease | None]:
        """Lease those values that are visible."""

    def release(self, leases: Sequence[Lease | None], /) -> None: ...

    def lengths(self, keys: Sequence[Key], /) -> Sequence[int | None]:
        """Length of each visible value, without touching or leasing it."""

    def drop(self, keys: Sequence[Key], /) -> int:
        """Make values invisible at once; their memory returns when the last lease ends. Counts what was there."""

    def scan(self, after: int, limit: int, /) -> tuple[Sequence[tuple[Key, int]], int | None]:
        """Keys and lengths of visible values from ``after`` on (0 first), and where to go on, or None."""

    def usage(self) -> tuple[int, int]:
        """Bytes that are not free, padding included, and the number of visible values."""

    def close(self) -> None: ...
