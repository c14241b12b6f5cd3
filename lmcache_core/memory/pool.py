"""Values in memory: arena, index, eviction policy and the life of an object in one thread-safe place.

Life: ``reserved -> visible (clean | dirty) -> quarantined -> free``. *Leased* is a flag of a visible
value. Time ends nothing: a reservation ends by ``commit`` or ``abort``, a lease by ``release``, and
both by ``close_owner`` with proof that the owner is gone. The identity
``free + clean + dirty + reserved + quarantined == capacity`` is what ``check`` asserts.

One lock; every batch holds it once, and no call waits for memory or I/O. Owners are any hashable objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Lock

from lmcache_core.memory.accounting import Accounting, check, take_stock
from lmcache_core.memory.arena import Arena
from lmcache_core.memory.index import IDENTITY_NBYTES
from lmcache_core.memory.leases import Held, Leases, Loan, State
from lmcache_core.memory.ledger import DIRTY, Ledger, Owner, padded
from lmcache_core.spi.buffers import Lease, Refusal, Reservation
from lmcache_core.spi.keys import Key
from lmcache_core.spi.policy import EvictionPolicy

_NO_KEY = Key(b"", b"")
"""Of an item of ``share`` that is no lease."""
_RESERVATION = 8
"""Leases whose end is as much work as that of one reservation."""


class Pool(Ledger):
    """The resident tier's memory; implements ``lmcache_core.spi.ResidentPool``.

    Args:
        arena: the bytes; the pool owns it and closes it.
        policy: who leaves; called under the pool's lock only.
        quotas: bytes a tenant may hold, padding included; ``default_quota`` for all others.
        dirty_share: cap of dirty bytes as a share of the capacity.
        clean_share: share of the capacity that should be clean or free.
        quarantine_share: share of the capacity one closed owner may hold before it gets nothing new.
        now: clock for expiry; without it values never expire.
        on_evict: told the keys (and their padded bytes) that left under pressure, outside the lock.

    Attributes:
        arena: the bytes, for handing segments to other processes.
        frozen: while True every ``reserve`` of a new key is ``UNWANTED``; reads go on.
        quotas, default_quota: may be replaced; a tenant over its new one shrinks at its next ``reserve``.
    """

    def __init__(
        self,
        arena: Arena,
        policy: EvictionPolicy,
        *,
        quotas: Mapping[str, int] | None = None,
        default_quota: int | None = None,
        dirty_share: float = 0.25,
        clean_share: float = 0.05,
        quarantine_share: float = 0.25,
        now: Callable[[], float] | None = None,
        on_evict: Callable[[Sequence[Key], int], None] | None = None,
    ) -> None:
        super().__init__(arena, policy)
        self.quotas, self.default_quota = quotas or {}, default_quota
        self.dirty_cap = int(arena.capacity * dirty_share)
        self.now = now
        self.frozen = False
        self._closed = False
        self._clean_reserve = int(arena.capacity * clean_share)
        self._quarantine_cap = int(arena.capacity * quarantine_share)
        self._on_evict = on_evict
        self._lock = Lock()

    @property
    def capacity(self) -> int:
        """Bytes of the arena."""
        return self.arena.capacity

    def reserve(
        self,
        wants: Sequence[tuple[Key, int]],
        owner: object,
        /,
        *,
        tenant: str = "",
        cost: float = 1.0,
    ) -> list[Held | Refusal]:
        """Promise memory, evicting clean and unleased values; grants the longest fitting prefix.

        After the first ``FULL``, and the first that a quota forbids, nothing later is granted. Values of this
        batch that are present are never evicted for it.
        """
        answers: list[Held | Refusal] = []
        leases, arena = self.index.leases, self.arena
        with self._lock:
            slots = self._visible([key for key, _ in wants])
            present = [slot for slot in slots if slot >= 0]
            limited = self.quotas or self.default_quota is not None
            refused = Refusal.UNWANTED if self.frozen or self._barred(owner) else None
            for slot in present:
                leases[slot] += 1  # no eviction of this very prefix; undone below
            try:
                for (key, nbytes), slot in zip(wants, slots, strict=True):
                    answer: Held | Refusal
                    if slot >= 0:
                        answer = Refusal.PRESENT
                    elif key in self.pending:
                        answer = Refusal.PENDING
                    elif refused is not None:
                        answer = refused
                    elif (size := padded(nbytes)) > self.largest:
                        answer = Refusal.TOO_LARGE
                    elif not self.policy.admit(mark := self.index.fingerprint(key), size):
                        answer = Refusal.UNWANTED
                    elif limited and not self._within_quota(tenant, size):
                        answer = refused = Refusal.UNWANTED
                    elif (place := self._find_room(size)) is None:
                        answer = refused = Refusal.FULL
                    else:
                        state = State.RESERVED
                        answer = Held(arena, key, nbytes, *place, owner, state, tenant, cost, mark)
                        self._enter(answer)
                    answers.append(answer)
            finally:
                for slot in present:
                    leases[slot] -= 1
            evicted, self.evicted = self.evicted, []
        if evicted and self._on_evict is not None:
            self._on_evict([key for key, _ in evicted], sum(size for _, size in evicted))
        return answers

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
        """Make a filled value visible. False: it was aborted or quarantined; its memory is free now.

        Beyond the dirty cap a value becomes clean at once (it is not among ``dirty_keys``), counted.
        """
        return self.commit_batch(
            (reservation,), (identity,), dirty=dirty, tags=tags, expires=expires
        )[0]

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
        if any(len(identity) != IDENTITY_NBYTES for identity in identities):
            raise ValueError(f"an identity has {IDENTITY_NBYTES} bytes")
        pairs = [*zip(map(self._own, reservations), identities, strict=True)]
        with self._lock:
            done = [self._show(held, each, dirty, tags, expires) for held, each in reversed(pairs)]
        return done[::-1]

    def abort(self, reservation: Reservation, /) -> None:
        """The writer will not write any more: its memory is free. Idempotent."""
        with self._lock:
            self._end_held(self._own(reservation))

    def quarantine(self, reservation: Reservation, /) -> None:
        """Give up on a writer that may still write: the key is free for others, the memory is not.

        Ends by ``abort`` or ``commit`` (which is then False) when the writer is known to be done.
        """
        with self._lock:
            self._isolate(self._own(reservation))

    def lease(self, keys: Sequence[Key], owner: object, /, *, touch: bool = True) -> Leases:
        """Lease what is visible and touch it, leaf to root (the order of ``keys`` is root to leaf).

        The sequence holds None for a miss. ``release`` takes it whole, or any of its items.
        Without ``touch`` the policy learns nothing (writing back is no use).
        """
        with self._lock:
            slots = [-1] * len(keys) if self._barred(owner) else self._visible(keys)
            batch = self._lease(keys, slots, owner)
            if touch:
                self.policy.touch([slot for slot in slots[::-1] if slot >= 0])
        return batch

    def share(self, leases: Sequence[Lease | None], owner: object, /) -> Leases:
        """Lease the same values again for another owner, even if they were dropped meanwhile.

        Also for one that gets nothing new: this is no more memory than before, and it is told that it has it.
        """
        with self._lock:
            if isinstance(leases, Leases):  # mostly, and there may be thousands
                assert leases.columns is self.index, "another pool's"
                slots = [-1] * len(leases) if self._closed else leases.slots.copy()
                return self._lease(leases.keys, slots, owner)
            loans = [lease if isinstance(lease, Loan) and lease.held else None for lease in leases]
            assert all(loan.batch.columns is self.index for loan in loans if loan), "another pool's"
            slots = [
                -1 if self._closed or not one else one.batch.slots[one.position] for one in loans
            ]
            return self._lease([loan.key if loan else _NO_KEY for loan in loans], slots, owner)

    def release(self, leases: Sequence[Lease | None], /) -> None:
        """End leases; those that ended before are ignored."""
        with self._lock:
            if isinstance(leases, Leases):
                assert leases.columns is self.index, "leases of another pool"
                self._end_leases(leases)
                return
            for loan in leases:
                if loan is not None:
                    assert isinstance(loan, Loan), f"not a lease of a pool: {loan!r}"
                    assert loan.batch.columns is self.index, f"a lease of another pool: {loan!r}"
                    self._end_leases(loan.batch, (loan.position,))

    def touch(self, keys: Sequence[Key], /) -> None:
        """Note a use of each visible value, leaf to root, without leasing it."""
        with self._lock:
            self.policy.touch([slot for slot in reversed(self._visible(keys)) if slot >= 0])

    def hint(self, keys: Sequence[Key], /) -> None:
        """Tell the policy that these values are expected to be used again."""
        with self._lock:
            self.policy.hint([slot for slot in self._visible(keys) if slot >= 0])

    def touch_ahead(self, nbytes: int, /) -> None:
        """From now on touch memory in the background only so far beyond what is in use; begin at once."""
        with self._lock:
            self.arena.toucher.ahead = nbytes
            if not self.arena.segments:
                self._grow()

    def lengths(self, keys: Sequence[Key], /) -> list[int | None]:
        """Length of each visible value, without touching or leasing it."""
        with self._lock:
            nbytes = self.index.nbytes
            return [nbytes[slot] if slot >= 0 else None for slot in self._visible(keys)]

    def drop(self, keys: Sequence[Key], /) -> int:
        """Make values invisible at once; leased ones stay in quarantine until their last lease ends."""
        with self._lock:
            return self._drop_slots({slot for slot in self.index.slots_of(keys) if slot >= 0})

    def drop_tag(self, tag: str, /) -> int:
        """``drop`` everything that carries the tag."""
        with self._lock:
            return self._drop_slots(filter(self.index.visible, self.index.tagged(tag)))

    def mark_clean(self, keys: Sequence[Key], /) -> None:
        """A lower tier has these values; they may be evicted again."""
        with self._lock:
            for slot in self.index.slots_of(keys):
                if slot >= 0 and self.index.flags[slot] & DIRTY:
                    self._wash(slot)

    def scan(self, after: int, limit: int, /) -> tuple[list[tuple[Key, int]], int | None]:
        """Keys and lengths in slot order from ``after`` (0 first); the place to go on, or None."""
        with self._lock:
            slots, then = self.index.page(after, limit)
            return [(self.index.key(slot), self.index.nbytes[slot]) for slot in slots], then

    def usage(self) -> tuple[int, int]:
        """Bytes that are not free, padding included, and the number of visible values."""
        with self._lock:
            return self.capacity - self.free, self.index.visible_count

    def close_owner(self, owner: object, /, *, proof: bool) -> int:
        """End service for an owner; returns the bytes it still holds.

        With ``proof`` that it can touch nothing any more, all its memory comes back. Without, its
        reservations are quarantined and its leases stay; both still end by release and abort.
        """
        for _ in self.closing(owner, proof=proof, most=self.capacity):
            pass
        with self._lock:
            return self._holding(self.owners.get(owner, Owner()))

    def closing(self, owner: object, /, *, proof: bool, most: int) -> Iterator[None]:
        """``close_owner`` for what is held at its first step, in steps of at most so many values or one batch."""
        with self._lock:
            record = self.owners.get(owner, Owner())
            record.closed = True
            rights = [*record.rights]
        while rights:
            with self._lock:
                left = most
                while rights and left > 0:
                    right = rights.pop()
                    if isinstance(right, Leases):
                        left -= len(right)
                        if proof:
                            self._end_leases(right)
                        continue
                    left -= _RESERVATION
                    self._end_held(right) if proof else self._isolate(right)
            if rights:
                yield

    def tenant(self, reservation: Reservation, /) -> str:
        """Whose quota a reservation is charged to."""
        return self._own(reservation).tenant

    def accounting(self) -> Accounting:
        """Where every byte is now."""
        with self._lock:
            return take_stock(self, self._clean_reserve)

    @property
    def short_of_clean(self) -> bool:
        """Whether ``accounting().clean_short`` is above 0; O(1) unless leases could make the difference."""
        with self._lock:
            spare = self.free + self.sums[State.CLEAN] - self._clean_reserve
            if spare < 0 or spare >= self.lent * max(self.slabs.sizes(), default=0):
                return spare < 0
            return take_stock(self, self._clean_reserve).clean_short > 0

    def check(self) -> None:
        """Assert every invariant from the structures themselves (slow)."""
        with self._lock:
            check(self)

    def close(self) -> None:
        """Give the arena back; idempotent. Mappings stay until their last view is gone.

        Nothing is granted or becomes visible any more; rights may still end.
        """
        with self._lock:
            self._closed = True
            self._drop_slots([*filter(self.index.visible, self.index.slots())])
            for held in [*self.pending.values()]:
                self._isolate(held)
            self.arena.close()

    def _barred(self, owner: object) -> bool:
        record = self.owners.get(owner)
        stuck = (
            record is not None and record.closed and self._holding(record) > self._quarantine_cap
        )
        return self._closed or stuck

    def _lease(self, keys: Sequence[Key], slots: list[int], owner: object) -> Leases:
        batch = Leases(self.index, self.arena, keys, slots, owner)
        if batch.left:
            self.lent += batch.left
            leases = self.index.leases
            for slot in slots:
                if slot >= 0:
                    leases[slot] += 1
            self._give(batch)
        return batch

    def _own(self, reservation: Reservation) -> Held:
        assert isinstance(reservation, Held), f"not a reservation of a pool: {reservation!r}"
        assert reservation.arena is self.arena, f"a reservation of another pool: {reservation!r}"
        return reservation
