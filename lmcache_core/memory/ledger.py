"""The state of a pool and its transitions, for one thread: ``Pool`` is the same behind a lock.

Every byte of the arena is in exactly one of ``free, clean, dirty, reserved, staging, quarantined``;
each method below moves whole extents between them and does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lmcache_core.memory.arena import PAGE, Arena
from lmcache_core.memory.index import Index
from lmcache_core.memory.leases import NO_KEY, Held, Leases, State
from lmcache_core.memory.slabs import Slab, Slabs
from lmcache_core.spi.buffers import Refusal
from lmcache_core.spi.keys import Key
from lmcache_core.spi.policy import EvictionPolicy

DIRTY, HIDDEN = 1, 2
"""Bits of ``Index.flags``: not in a lower tier yet; invisible, kept for its leases."""
_LARGEST_SLAB = 64 << 20
_SLABS = 128
_STRANDED_SHARE = 0.02
_SEARCH = 1 << 16
"""Busy values an eviction looks past before it gives up, so that one call stays bounded."""


class Owner:
    """What one owner holds; ``closed`` once its service has ended without proof of its death."""

    __slots__ = ("closed", "held", "leases")

    def __init__(self) -> None:
        self.leases: set[Leases] = set()
        self.held: set[Held] = set()
        self.closed = False


class Ledger:
    """Index, extents, owners and the sums of one pool.

    Attributes:
        clean, dirty, reserved, staging, quarantined: bytes of extents, padding included.
        internal: padding inside all extents in use.
        usage: bytes of visible, reserved and quarantined values by number of the tenant.
        evicted: keys and bytes that left under pressure and were not reported yet.
    """

    def __init__(self, arena: Arena, policy: EvictionPolicy, staging: int) -> None:
        self.arena = arena
        self.policy = policy
        self.index = Index(extents=True)
        self.slabs = Slabs(min(_LARGEST_SLAB, max(PAGE, arena.capacity // _SLABS)))
        self.staging_slabs = Slabs(PAGE)
        while (short := staging - arena.reserved) > 0 and (segment := arena.grow(short)):
            self.staging_slabs.add_segment(segment.number, segment.nbytes)
        self.staging_capacity = arena.reserved
        self._largest = min(arena.segment_nbytes, arena.capacity - self.staging_capacity)
        self.owners: dict[object, Owner] = {}
        self.pending: dict[Key, Held] = {}
        self.dirty_slots: dict[int, None] = {}
        self.usage: list[int] = []
        self.quotas: dict[str, int] = {}
        self.default_quota: int | None = None
        self.dirty_cap = arena.capacity
        self.clean = self.dirty = self.reserved = self.staging = self.quarantined = 0
        self.internal = 0
        self.dirty_refused = 0
        self.evicted: list[tuple[Key, int]] = []
        self.now: Callable[[], float] | None = None
        self._expiring = False
        self._skipped = 0
        self._stranded_cap = int(arena.capacity * _STRANDED_SHARE)

    @property
    def free(self) -> int:
        """Bytes in no use, whether the arena has grown to them or not."""
        unborn = self.arena.capacity - self.arena.reserved
        lost = self.slabs.lost + self.staging_slabs.lost
        return self.slabs.free + self.staging_slabs.free + lost + unborn

    def visible(self, keys: Sequence[Key]) -> list[int]:
        """Slots of visible values, -1 for others; what has expired is dropped first."""
        slots = self.index.slots_of(keys)
        if self._expiring and self.now is not None:
            now, expires = self.now(), self.index.expires
            if old := {slot for slot in slots if slot >= 0 and expires[slot] <= now}:
                self.drop(old)
                slots = [-1 if slot in old else slot for slot in slots]
        return slots

    def owner(self, owner: object) -> Owner:
        """The record of an owner, made at its first right and forgotten after its last."""
        record = self.owners.get(owner)
        if record is None:
            record = self.owners[owner] = Owner()
        return record

    def holding(self, record: Owner) -> int:
        """Bytes an owner keeps from being used again."""
        slots = {slot for batch in record.leases for slot in batch.slots if slot >= 0}
        slabs = [held.slab for held in record.held] + [self.index.places[slot] for slot in slots]
        return sum(slab.size for slab in slabs)

    def tenant(self, name: str) -> int:
        """The number of a tenant, with a place in ``usage``."""
        number = self.index.tenant_number(name)
        self.usage += [0] * (number + 1 - len(self.usage))
        return number

    def reserve(
        self, key: Key, nbytes: int, owner: object, tenant: int, cost: float
    ) -> Held | Refusal:
        """Promise memory for a key that is neither visible nor pending."""
        size = padded(nbytes)
        if size > self._largest:
            return Refusal.TOO_LARGE
        fingerprint = self.index.fingerprint(key)
        if not self.policy.admit(fingerprint, size) or not self._within_quota(tenant, size):
            return Refusal.UNWANTED
        place = self.slabs.take(size) or self._find_room(size)
        if place is None:
            return Refusal.FULL
        held = Held(
            self.arena, key, nbytes, place, owner, State.RESERVED, tenant, cost, fingerprint
        )
        self.reserved += size
        self.internal += size - nbytes
        self.usage[tenant] += size
        self.pending[key] = held
        return held

    def place(self, slabs: Slabs, size: int) -> tuple[Slab, int] | None:
        """Find a free extent with real memory behind it."""
        while (found := slabs.take(size)) is None:
            slab = slabs.carve(size)
            if slab is None:
                return None
            if not self.arena.back(slab.segment, slab.base, slab.nbytes):
                slabs.lose(slab)
        return found

    def commit(
        self, held: Held, identity: bytes, dirty: bool, tags: Iterable[str], expires: float | None
    ) -> bool:
        """Make a reservation visible; True unless it had ended or was quarantined."""
        if held.state is not State.RESERVED:
            self.end_held(held)
            return False
        index, slab, size = self.index, held.slab, held.slab.size
        slot = index.add(held.key, held.nbytes, identity=identity, tenant=held.tenant)
        index.places[slot] = slab
        index.positions[slot] = held.position
        slab.users[held.position] = slot
        if expires is not None:
            index.expires[slot] = expires
            self._expiring = True
        if tags:
            index.tag(slot, tags)
        self.reserved -= size
        if dirty and self.dirty + size <= self.dirty_cap:
            index.flags[slot] = DIRTY
            self.dirty_slots[slot] = None
            self.dirty += size
        else:
            self.clean += size
            self.dirty_refused += dirty
        self.policy.insert(slot, held.fingerprint, size, held.cost)
        del self.pending[held.key]
        self._forget_held(held)
        return True

    def quarantine(self, held: Held) -> None:
        """Take a key from its writer, but not the memory."""
        size = held.slab.size
        if held.state is State.RESERVED:
            del self.pending[held.key]
            self.reserved -= size
        elif held.state is State.STAGING:
            self.staging -= size
        else:
            return
        self.quarantined += size
        held.state = State.QUARANTINED

    def end_held(self, held: Held) -> None:
        """The writer is done with memory that did not become a value; idempotent."""
        if held.state is State.DONE:
            return
        slab, size = held.slab, held.slab.size
        self.quarantine(held)
        self.quarantined -= size
        self.internal -= size - held.nbytes
        if held.key is NO_KEY:
            slabs = self.staging_slabs
        else:
            slabs = self.slabs
            self.usage[held.tenant] -= size
        self.arena.segments[slab.segment].advance(held.base)
        slabs.give(slab, held.position)
        self._forget_held(held)

    def end_leases(self, batch: Leases) -> None:
        """Release everything a batch still holds."""
        leases, flags = self.index.leases, self.index.flags
        slots, batch.slots = batch.slots, [-1] * len(batch.slots)
        batch.left = 0
        for slot in slots:
            if slot >= 0:
                left = leases[slot] - 1
                leases[slot] = left
                if not left and flags[slot] & HIDDEN:
                    self._bury(slot)
        self._forget_leases(batch)

    def end_lease(self, batch: Leases, position: int) -> None:
        """Release one item of a batch; idempotent."""
        slot = batch.slots[position]
        if slot < 0:
            return
        batch.slots[position] = -1
        batch.left -= 1
        self.index.leases[slot] -= 1
        if not self.index.leases[slot] and self.index.flags[slot] & HIDDEN:
            self._bury(slot)
        if not batch.left:
            self._forget_leases(batch)

    def drop(self, slots: Iterable[int]) -> int:
        """Make distinct visible values invisible; leased ones wait in quarantine."""
        index, count = self.index, 0
        for slot in slots:
            count += 1
            self.policy.remove(slot)
            if index.flags[slot] & DIRTY:
                self.wash(slot)
            size = index.places[slot].size
            self.clean -= size
            if index.leases[slot]:
                index.hide(slot)
                index.flags[slot] |= HIDDEN
                self.quarantined += size
            else:
                self._free_value(slot)
        return count

    def wash(self, slot: int) -> None:
        """Turn a dirty value into a clean one."""
        size = self.index.places[slot].size
        self.index.flags[slot] &= ~DIRTY
        del self.dirty_slots[slot]
        self.dirty -= size
        self.clean += size

    def _find_room(self, size: int) -> tuple[Slab, int] | None:
        """Carve, grow or evict until there is an extent of this size."""
        arena, slabs = self.arena, self.slabs
        while True:
            if slabs.loose >= size and (place := self.place(slabs, size)):
                return place
            if arena.reserved < arena.capacity and (segment := arena.grow()):
                slabs.add_segment(segment.number, segment.nbytes)
            elif not self._make_room(size):
                return None
            elif place := slabs.take(size):
                return place

    def _within_quota(self, tenant: int, size: int) -> bool:
        """Make a tenant's own values leave until another one fits into its quota."""
        if self.default_quota is None and not self.quotas:
            return True
        limit = self.quotas.get(self.index.tenant_names[tenant], self.default_quota)
        if limit is None:
            return True
        tenants = self.index.tenants
        while self.usage[tenant] + size > limit:
            victim = self._victim(lambda slot: tenants[slot] == tenant) if size <= limit else None
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _make_room(self, size: int) -> bool:
        """Evict something towards a free extent of this size; False when nothing may leave for it.

        The policy's order is followed across sizes. When that has left enough free memory in the wrong
        places, the neighbouring slabs with the fewest used bytes are emptied instead; where a lease
        pins them all, only values of the same size help.
        """
        if self.slabs.free < max(2 * size, self._stranded_cap):
            victim = self._victim(None)
        else:
            row = self.slabs.window(size, self._movable)
            if row is not None:
                for slot in [user for slab in row for user in slab.users if user >= 0]:
                    self._evict(slot)
                return True
            places = self.index.places
            victim = self._victim(lambda slot: places[slot].size == size)
        if victim is None:
            return False
        self._evict(victim)
        return True

    def _victim(self, wanted: Callable[[int], bool] | None) -> int | None:
        if not self.clean:
            return None
        self._skipped = 0
        busy = self._busy
        if wanted is not None:
            wish = wanted

            def busy(slot: int) -> bool:
                return self._busy(slot) or (not wish(slot) and self._skip())

        slot = self.policy.victim(busy)
        return slot if self._skipped <= _SEARCH else None

    def _busy(self, slot: int) -> bool:
        index = self.index
        return bool(index.leases[slot] or index.flags[slot]) and self._skip()

    def _skip(self) -> bool:
        """Count a value looked past; False ends the search (and its result is not used)."""
        self._skipped += 1
        return self._skipped <= _SEARCH

    def _movable(self, slab: Slab) -> bool:
        leases, flags = self.index.leases, self.index.flags
        return all(u == -1 or (u >= 0 and not leases[u] and not flags[u]) for u in slab.users)

    def _evict(self, slot: int) -> None:
        size = self.index.places[slot].size
        self.evicted.append((self.index.key(slot), size))
        self.policy.remove(slot, evicted=True)
        self.clean -= size
        self._free_value(slot)

    def _bury(self, slot: int) -> None:
        """The last lease of a dropped value has ended."""
        self.quarantined -= self.index.places[slot].size
        self._free_value(slot)

    def _free_value(self, slot: int) -> None:
        index = self.index
        slab: Slab = index.places[slot]
        position, size = index.positions[slot], slab.size
        self.internal -= size - index.nbytes[slot]
        self.usage[index.tenants[slot]] -= size
        self.arena.segments[slab.segment].advance(slab.base + position * size)
        self.slabs.give(slab, position)
        index.remove(slot)

    def _forget_held(self, held: Held) -> None:
        held.state = State.DONE
        record = self.owners[held.owner]
        record.held.discard(held)
        if not record.held and not record.leases:
            del self.owners[held.owner]

    def _forget_leases(self, batch: Leases) -> None:
        record = self.owners.get(batch.owner)
        if record is not None:
            record.leases.discard(batch)
            if not record.held and not record.leases:
                del self.owners[batch.owner]


def padded(nbytes: int) -> int:
    """Bytes an extent for a value of this length takes."""
    return max(PAGE, -(-nbytes // PAGE) * PAGE)
