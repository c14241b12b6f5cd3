"""The state of a pool and its transitions, for one thread: ``Pool`` adds the lock and the verbs.

Every byte of the arena is free or in exactly one ``State``; each method below moves whole extents
between them and does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lmcache_core.memory.arena import PAGE, Arena
from lmcache_core.memory.index import Index
from lmcache_core.memory.leases import Held, Leases, State
from lmcache_core.memory.slabs import Slab, Slabs
from lmcache_core.spi.keys import Key
from lmcache_core.spi.policy import EvictionPolicy

DIRTY, HIDDEN = 1, 2
"""Bits of ``Index.flags``: not in a lower tier yet; invisible, kept for its leases."""
_CLEAN, _DIRTY, _RESERVED, _QUARANTINED, _DONE = State  # as names of the module they are fast
_LARGEST_SLAB = 64 << 20
_SLABS = 128
_STRANDED_SHARE = 0.02
_SEARCH = 1 << 16
"""Busy values an eviction looks past before it gives up, so that one call stays bounded."""


@dataclass(slots=True)
class Owner:
    """What one owner holds; ``closed`` once its service has ended without proof of its death."""

    rights: set[Held | Leases] = field(default_factory=set)
    closed: bool = False


class Ledger:
    """Index, extents, owners and the sums of one pool.

    Attributes:
        sums: bytes of extents, padding included, by ``State``.
        internal: padding inside all extents in use.
        lent: open leases; a value counts once for each.
        usages: bytes of visible, reserved and quarantined values by tenant.
        evicted: keys and bytes that left under pressure and were not reported yet.
    """

    def __init__(self, arena: Arena, policy: EvictionPolicy) -> None:
        self.arena = arena
        self.policy = policy
        self.index = Index(extents=True)
        self.slabs = Slabs(min(_LARGEST_SLAB, max(PAGE, arena.capacity // _SLABS)))
        self.largest = arena.segment_nbytes
        self.owners: dict[object, Owner] = {}
        self.pending: dict[Key, Held] = {}
        self.usages: dict[str, int] = {}
        self.quotas: Mapping[str, int] = {}
        self.default_quota: int | None = None
        self.dirty_cap = arena.capacity
        self.sums = [0] * _DONE
        self.internal = 0
        self.lent = 0
        self.dirty_refused = 0
        self.evicted: list[tuple[Key, int]] = []
        self.now: Callable[[], float] | None = None
        self._expiring = False
        self._stranded_cap = int(arena.capacity * _STRANDED_SHARE)

    @property
    def free(self) -> int:
        """Bytes in no use, whether the arena has grown to them or not."""
        return self.arena.capacity - sum(self.sums)

    def _visible(self, keys: Sequence[Key]) -> list[int]:
        """Slots of visible values, -1 for others; what has expired is dropped first."""
        slots = self.index.slots_of(keys)
        if self._expiring and self.now is not None:
            now, expires = self.now(), self.index.expires
            if old := {slot for slot in slots if slot >= 0 and expires[slot] <= now}:
                self._drop_slots(old)
                slots = [-1 if slot in old else slot for slot in slots]
        return slots

    def _give(self, right: Held | Leases) -> None:
        """Enter a right; an owner is known from its first right to its last."""
        record = self.owners.get(right.owner)
        if record is None:
            record = self.owners[right.owner] = Owner()
        record.rights.add(right)

    def _holding(self, record: Owner) -> int:
        """Bytes an owner keeps from being used again."""
        slabs: list[Slab] = [right.slab for right in record.rights if isinstance(right, Held)]
        batches = [right for right in record.rights if isinstance(right, Leases)]
        slots = {slot for batch in batches for slot in batch.slots if slot >= 0}
        return sum(slab.size for slab in [*slabs, *map(self.index.places.__getitem__, slots)])

    def _enter(self, held: Held) -> None:
        """Take memory that was just found into the books."""
        size = held.slab.size
        self.sums[held.state] += size
        self.internal += size - held.nbytes
        self.usages[held.tenant] = self.usages.get(held.tenant, 0) + size
        self.pending[held.key] = held
        self._give(held)

    def _grow(self) -> bool:
        """Put one more segment to use; False: there is none."""
        segment = self.arena.grow()
        if segment is not None:
            self.slabs.add_segment(segment.number, segment.nbytes)
        return segment is not None

    def _place(self, size: int) -> tuple[Slab, int] | None:
        """Find a free extent with real memory behind it."""
        slabs = self.slabs
        while (found := slabs.take(size)) is None:
            slab = slabs.carve(size)
            if slab is None:
                return None
            if not self.arena.back(slab.segment, slab.base, slab.nbytes):
                slabs.lose(slab)
        return found

    def _find_room(self, size: int) -> tuple[Slab, int] | None:
        """Take, carve, grow or evict until there is an extent of this size."""
        arena, slabs = self.arena, self.slabs
        place = slabs.take(size)
        while place is None:
            if slabs.loose >= size and (place := self._place(size)):
                break
            if arena.reserved < arena.capacity and self._grow():
                continue
            if not self._make_room(size):
                break
            place = slabs.take(size)
        return place

    def _within_quota(self, tenant: str, size: int) -> bool:
        """Make a tenant's own values leave until another one fits into its quota."""
        limit = self.quotas.get(tenant, self.default_quota)
        if limit is None:
            return True
        whose = self.index.tenant_name
        while self.usages.get(tenant, 0) + size > limit:
            victim = self._victim(lambda slot: whose(slot) == tenant) if size <= limit else None
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _show(
        self, held: Held, identity: bytes, dirty: bool, tags: Iterable[str], expires: float | None
    ) -> bool:
        """Make a reservation visible; True unless it had ended or was quarantined."""
        if held.state is not _RESERVED:
            self._end_held(held)
            return False
        index, size = self.index, held.slab.size
        slot = index.add(held.key, held.nbytes, identity=identity, tenant=held.tenant)
        index.places[slot] = held.slab
        index.positions[slot] = held.position
        held.slab.users[held.position] = slot
        if expires is not None:
            index.expires[slot] = expires
            self._expiring = True
        if tags:
            index.tag(slot, tags)
        state = _CLEAN
        if dirty and self.sums[_DIRTY] + size > self.dirty_cap:
            self.dirty_refused += 1
        elif dirty:
            state = _DIRTY
            index.flags[slot] = DIRTY
        self.sums[_RESERVED] -= size
        self.sums[state] += size
        self.policy.insert(slot, held.fingerprint, size, held.cost)
        del self.pending[held.key]
        held.state = _DONE
        self._forget(held)
        return True

    def _move(self, size: int, old: State, new: State) -> None:
        """Enter bytes under another state."""
        self.sums[old] -= size
        self.sums[new] += size

    def _isolate(self, held: Held) -> None:
        """Take a key from its writer, but not the memory."""
        if held.state is _RESERVED:
            del self.pending[held.key]
            self._move(held.slab.size, _RESERVED, _QUARANTINED)
            held.state = _QUARANTINED

    def _end_held(self, held: Held) -> None:
        """The writer is done with memory that did not become a value; idempotent."""
        if held.state is _DONE:
            return
        self._isolate(held)
        held.state = _DONE
        self._free(held.slab, held.position, held.nbytes, _QUARANTINED, held.tenant)
        self._forget(held)

    def _end_leases(self, batch: Leases, positions: Iterable[int] | None = None) -> None:
        """Release some or all that a batch still holds."""
        before = batch.left
        if positions is None:
            slots, batch.slots = batch.slots, [-1] * len(batch.slots)
        else:
            slots = []
            for at in positions:
                slots.append(batch.slots[at])
                batch.slots[at] = -1
        leases, flags = self.index.leases, self.index.flags
        for slot in slots:
            if slot >= 0:
                batch.left -= 1
                left = leases[slot] - 1
                leases[slot] = left
                if not left and flags[slot] & HIDDEN:
                    self._free_value(slot, _QUARANTINED)
        self.lent -= before - batch.left
        if not batch.left:
            self._forget(batch)

    def _drop_slots(self, slots: Iterable[int]) -> int:
        """Make distinct visible values invisible; leased ones wait in quarantine."""
        index, count = self.index, 0
        for slot in slots:
            count += 1
            self.policy.remove(slot)
            if index.flags[slot] & DIRTY:
                self._wash(slot)
            if index.leases[slot]:
                index.hide(slot)
                index.flags[slot] |= HIDDEN
                self._move(index.places[slot].size, _CLEAN, _QUARANTINED)
            else:
                self._free_value(slot, _CLEAN)
        return count

    def _wash(self, slot: int) -> None:
        """Turn a dirty value into a clean one."""
        self.index.flags[slot] &= ~DIRTY
        self._move(self.index.places[slot].size, _DIRTY, _CLEAN)

    def _make_room(self, size: int) -> bool:
        """Evict something towards a free extent of this size; False when nothing may leave for it.

        The policy's order is followed across sizes. When that has left enough free memory in the wrong
        places, the neighbouring slabs with the fewest used bytes are emptied instead; where a lease
        pins them all, only values of the same size help.
        """
        wanted = None
        if self.slabs.free >= max(2 * size, self._stranded_cap):
            row = self.slabs.window(size, self._movable)
            if row is not None:
                for slot in [user for slab in row for user in slab.users if user >= 0]:
                    self._evict(slot)
                return True
            places = self.index.places

            def wanted(slot: int) -> bool:
                return bool(places[slot].size == size)

        victim = self._victim(wanted)
        if victim is not None:
            self._evict(victim)
        return victim is not None

    def _victim(self, wanted: Callable[[int], bool] | None = None) -> int | None:
        """Who leaves first of those that nobody uses; no policy can make any other leave."""
        if not self.sums[_CLEAN]:
            return None
        leases, flags = self.index.leases, self.index.flags
        skipped = 0

        def busy(slot: int) -> bool:
            nonlocal skipped
            if leases[slot] or flags[slot] or (wanted is not None and not wanted(slot)):
                skipped += 1
                return skipped <= _SEARCH  # False ends the search, and its result is not used
            return False

        slot = self.policy.victim(busy)
        if slot is None or skipped > _SEARCH or leases[slot] or flags[slot]:
            return None
        return slot

    def _movable(self, slab: Slab) -> bool:
        leases, flags = self.index.leases, self.index.flags
        return all(u == -1 or (u >= 0 and not leases[u] and not flags[u]) for u in slab.users)

    def _evict(self, slot: int) -> None:
        self.evicted.append((self.index.key(slot), self.index.places[slot].size))
        self.policy.remove(slot, evicted=True)
        self._free_value(slot, _CLEAN)

    def _free_value(self, slot: int, state: State) -> None:
        index = self.index
        place = index.places[slot], index.positions[slot]
        self._free(*place, index.nbytes[slot], state, index.tenant_name(slot))
        index.remove(slot)

    def _free(self, slab: Slab, position: int, nbytes: int, state: State, tenant: str) -> None:
        """Take an extent back."""
        size = slab.size
        self.sums[state] -= size
        self.internal -= size - nbytes
        self.arena.segments[slab.segment].advance(slab.base + position * size)
        self.slabs.give(slab, position)
        self.usages[tenant] -= size
        if not self.usages[tenant]:
            del self.usages[tenant]

    def _forget(self, right: Held | Leases) -> None:
        record = self.owners.get(right.owner)
        if record is not None:
            record.rights.discard(right)
            if not record.rights:
                del self.owners[right.owner]


def padded(nbytes: int) -> int:
    """Bytes an extent for a value of this length takes."""
    return max(PAGE, -(-nbytes // PAGE) * PAGE)
