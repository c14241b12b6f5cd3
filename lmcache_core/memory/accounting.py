"""Where every byte of a pool is, and the proof that the sums are true."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_core.memory.leases import NO_KEY, State
from lmcache_core.memory.ledger import DIRTY, HIDDEN, Ledger
from lmcache_core.memory.slabs import HELD


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """Bytes of a pool at one instant; extents count with their padding.

    Attributes:
        free: no value, no promise (the unused part of the staging reserve included).
        clean: visible, and leaving them loses nothing but the hit.
        dirty: visible, not in a lower tier yet.
        reserved: promised to a writer.
        staging: lent without a key.
        quarantined: invisible, but somebody may still touch it.
        leased: part of clean and dirty that is leased (a flag, no term of the identity).
        internal: padding inside extents (part of the terms above).
        stranded: free bytes that the largest size in use cannot have.
        values: number of visible values.
        clean_short: bytes to be written ahead so that the clean reserve is met.
        dirty_room: bytes that may still become dirty.
        dirty_refused: commits that asked for dirty beyond the cap and became clean instead.
        populated: bytes of the arena that are backed by real memory.
        usage: bytes by tenant.
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
    usage: dict[str, int]


def take_stock(ledger: Ledger, clean_reserve: int) -> Accounting:
    """The books as they are kept; costs O(open leases)."""
    index = ledger.index
    leased = {s for s in _leased(ledger) if not index.flags[s] & HIDDEN}
    pinned = sum(index.places[s].size for s in leased if not index.flags[s] & DIRTY)
    sizes = ledger.slabs.sizes()
    return Accounting(
        capacity=ledger.arena.capacity,
        free=ledger.free,
        clean=ledger.clean,
        dirty=ledger.dirty,
        reserved=ledger.reserved,
        staging=ledger.staging,
        quarantined=ledger.quarantined,
        leased=sum(index.places[slot].size for slot in leased),
        internal=ledger.internal,
        stranded=ledger.slabs.stranded(max(sizes)) if sizes else 0,
        values=index.visible_count,
        clean_short=max(0, clean_reserve - (ledger.free + ledger.clean - pinned)),
        dirty_room=max(0, ledger.dirty_cap - ledger.dirty),
        dirty_refused=ledger.dirty_refused,
        populated=ledger.arena.populated,
        usage={name: n for name, n in zip(index.tenant_names, ledger.usage, strict=False) if n},
    )


def check(ledger: Ledger) -> None:
    """Assert the capacity identity and every sum from the records themselves."""
    index = ledger.index
    found = dict.fromkeys(("clean", "dirty", "reserved", "staging", "quarantined"), 0)
    usage = [0] * len(ledger.usage)
    internal = 0
    users: dict[tuple[int, int], int] = {}
    for slot in index.slots():
        slab, flags = index.places[slot], index.flags[slot]
        assert index.visible(slot) != bool(flags & HIDDEN), f"slot {slot}: hidden and visible"
        assert index.leases[slot] or not flags & HIDDEN, f"slot {slot}: dropped, unleased, kept"
        assert (slot in ledger.dirty_slots) == bool(flags & DIRTY), f"slot {slot}: dirty list"
        found["quarantined" if flags & HIDDEN else "dirty" if flags & DIRTY else "clean"] += (
            slab.size
        )
        usage[index.tenants[slot]] += slab.size
        internal += slab.size - index.nbytes[slot]
        users[id(slab), index.positions[slot]] = slot
    for owner, record in ledger.owners.items():
        assert record.held or record.leases, f"{owner!r} holds nothing"
        assert all(b.owner == owner and b.left for b in record.leases), f"{owner!r}: leases"
        for held in record.held:
            assert held.owner == owner, f"{held!r} belongs to another owner"
            assert held.state is not State.DONE, f"{held!r} has ended"
            pending = ledger.pending.get(held.key) is held
            assert pending == (held.state is State.RESERVED), f"{held!r}: pending"
            found[held.state.name.lower()] += held.slab.size
            internal += held.slab.size - held.nbytes
            users[id(held.slab), held.position] = HELD
            if held.key is not NO_KEY:
                usage[held.tenant] += held.slab.size
    counts: dict[int, int] = {}
    for slot in _leased(ledger):
        counts[slot] = counts.get(slot, 0) + 1
    for slot in index.slots():
        assert index.leases[slot] == counts.get(slot, 0), f"slot {slot}: lease count"
    for slabs in (ledger.slabs, ledger.staging_slabs):
        slabs.check()
        for slab in slabs.slabs():
            for position, user in enumerate(slab.users):
                assert user == users.pop((id(slab), position), -1), f"extent of {user}"
    assert not users, "extents outside all slabs"
    for name, nbytes in found.items():
        assert getattr(ledger, name) == nbytes, f"{name}: {nbytes} found"
    assert sum(found.values()) + ledger.free == ledger.arena.capacity, "capacity identity"
    assert (usage, internal) == (ledger.usage, ledger.internal), "usage by tenant, padding"
    assert len(ledger.dirty_slots) == sum(bool(index.flags[s] & DIRTY) for s in index.slots())
    assert ledger.dirty <= ledger.dirty_cap, "more dirty than allowed"
    ledger.policy.check()


def _leased(ledger: Ledger) -> list[int]:
    """Slots of all leases, with repetition."""
    records = ledger.owners.values()
    batches = (batch for record in records for batch in record.leases)
    return [slot for batch in batches for slot in batch.slots if slot >= 0]
