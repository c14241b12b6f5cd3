"""Values in memory: arena, index, eviction policy and the life of an object in one thread-safe place.

Life: ``reserved -> visible (clean | dirty) -> quarantined -> free``. *Leased* is a flag of a visible
value. Time ends nothing: a reservation ends by ``commit`` or ``abort``, a lease by ``release``, and
both by ``close_owner`` with proof that the owner is gone. The identity
``free + clean + dirty + reserved + staging + quarantined == capacity`` is what ``check`` asserts.

One lock; every batch holds it once, and no call waits for memory or I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lmcache_core.memory.arena import Arena
from lmcache_core.memory.leases import Held, Leases
from lmcache_core.spi.buffers import Extent, Lease, Refusal, Reservation
from lmcache_core.spi.keys import Key
from lmcache_core.spi.policy import EvictionPolicy


@dataclass(frozen=True, slots=True)
class Accounting:
    """Where every byte of a pool is, at one instant; extents count with their padding.

    Attributes:
        free: no value, no promise (unused part of the staging reserve included).
        clean, dirty: visible values; dirty ones have not reached a lower tier yet.
        reserved: promised to a writer.
        staging: lent without a key.
        quarantined: invisible, but somebody may still touch it.
        leased: part of clean and dirty that is leased (a flag, no term of the identity).
        internal: padding inside extents (part of the terms above).
        stranded: free bytes in slabs of other sizes and in runs shorter than any live class.
        values: number of visible values.
        clean_short: bytes to be written ahead so that clean + free reaches the clean reserve.
        dirty_room: bytes that may still become dirty.
        dirty_refused: commits that asked for dirty beyond the cap and became clean instead.
        populated: bytes of the arena that are backed by real memory.
    """

    capacity: int
    free: int
    clean: int
    dirty: int
    reserved: int
    staging: int
    quarantined: int
    leased: int
    internal: int
    stranded: int
    values: int
    clean_short: int
    dirty_room: int
    dirty_refused: int
    populated: int


class Pool:
    """The resident tier's memory; implements ``lmcache_core.spi.ResidentPool``.

    Args:
        arena: the bytes; the pool owns it and closes it.
        policy: who leaves; called under the pool's lock only.
        staging: bytes of the arena kept apart for ``stage``.
        quotas: bytes a tenant may hold (visible and reserved); ``default_quota`` for all others.
        dirty_share: cap of dirty bytes as a share of the capacity.
        clean_share: share of the capacity that should be clean or free.
        quarantine_share: share of the capacity one closed owner may hold before it gets nothing new.
        now: clock for expiry; without it values never expire.
        on_evict: told the keys (and their padded bytes) that left under pressure, outside the lock.
    """

    def __init__(
        self,
        arena: Arena,
        policy: EvictionPolicy,
        *,
        staging: int = 0,
        quotas: Mapping[str, int] | None = None,
        default_quota: int | None = None,
        dirty_share: float = 0.25,
        clean_share: float = 0.05,
        quarantine_share: float = 0.25,
        now: Callable[[], float] | None = None,
        on_evict: Callable[[Sequence[Key], int], None] | None = None,
    ) -> None: ...

    frozen: bool
    """While True every ``reserve`` of a new key is ``UNWANTED``; reads go on."""

    @property
    def capacity(self) -> int: ...

    def reserve(
        self,
        wants: Sequence[tuple[Key, int]],
        owner: object,
        /,
        *,
        tenant: str = "",
        cost: float = 1.0,
    ) -> Sequence[Reservation | Refusal]:
        """Promise memory, evicting clean and unleased values; grants the longest fitting prefix.

        After the first ``FULL`` nothing later is granted. Values of this batch that are present are
        never evicted for it.
        """
        ...

    def commit(
        self,
        reservation: Reservation,
        identity: bytes,
        /,
        *,
        dirty: bool = False,
        tags: Iterable[str] = (),
        expires: float | None = None,
    ) -> bool:
        """Make a filled value visible. False: it was aborted or quarantined meanwhile; the memory is free.

        Beyond the dirty cap a value becomes clean at once (see ``dirty_keys``) and is counted.
        """
        ...

    def commit_batch(
        self,
        reservations: Sequence[Reservation],
        identities: Sequence[bytes],
        /,
        *,
        dirty: bool = False,
        tags: Iterable[str] = (),
        expires: float | None = None,
    ) -> list[bool]:
        """``commit`` for chunks of one prefix in order; the policy sees them leaf first, root last."""
        ...

    def abort(self, reservation: Reservation, /) -> None:
        """The writer will not write any more: its memory is free. Idempotent, staging included."""
        ...

    def quarantine(self, reservation: Reservation, /) -> None:
        """Give up on a writer that may still write: the key is free for others, the memory is not.

        Ends by ``abort`` or ``commit`` (which is then False) when the writer is known to be done.
        """
        ...

    def stage(self, sizes: Sequence[int], owner: object, /) -> Sequence[Held | Refusal]:
        """Lend memory without a key from the staging reserve; ends by ``abort``. Never evicts."""
        ...

    def lease(self, keys: Sequence[Key], owner: object, /) -> Leases:
        """Lease what is visible and touch it, leaf to root (the order of ``keys`` is root to leaf).

        The sequence holds None for a miss. ``release`` takes it whole, or any of its items.
        """
        ...

    def share(self, leases: Sequence[Lease | None], owner: object, /) -> Leases:
        """Lease the same values again for another owner, visible or not."""
        ...

    def release(self, leases: Sequence[Lease | None], /) -> None:
        """End leases; those that ended before are ignored."""
        ...

    def touch(self, keys: Sequence[Key], /) -> None:
        """Note a use of each visible value, leaf to root, without leasing it."""
        ...

    def hint(self, keys: Sequence[Key], /) -> None:
        """Tell the policy that these values are expected to be used again."""
        ...

    def lengths(self, keys: Sequence[Key], /) -> list[int | None]:
        """Length of each visible value, without touching or leasing it."""
        ...

    def drop(self, keys: Sequence[Key], /) -> int:
        """Make values invisible at once; leased ones stay in quarantine until their last lease ends."""
        ...

    def drop_tag(self, tag: str, /) -> int:
        """``drop`` everything that carries the tag."""
        ...

    def dirty_keys(self, limit: int, /) -> list[Key]:
        """Values that a lower tier has not got yet, oldest first."""
        ...

    def mark_clean(self, keys: Sequence[Key], /) -> None:
        """A lower tier has these values; they may be evicted again."""
        ...

    def scan(self, after: int, limit: int, /) -> tuple[list[tuple[Key, int]], int | None]:
        """Keys and lengths in slot order from ``after`` (0 first); the place to go on, or None."""
        ...

    def close_owner(self, owner: object, /, *, proof: bool) -> int:
        """End service for an owner; returns the bytes it still holds.

        With ``proof`` that it can touch nothing any more, all its memory comes back. Without, its
        reservations are quarantined and its leases stay; both still end by release and abort.
        """
        ...

    def address(self, extent: Extent, /) -> int:
        """Where the extent starts in this process's memory."""
        ...

    def accounting(self) -> Accounting: ...

    def check(self) -> None:
        """Assert every invariant from the structures themselves (slow)."""
        ...

    def close(self) -> None: ...
