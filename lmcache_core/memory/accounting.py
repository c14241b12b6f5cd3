"""Where every byte of a pool is, and the proof that the sums are true."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lmcache_core.memory.leases import Leases, State
from lmcache_core.memory.ledger import DIRTY, HIDDEN, Ledger
from lmcache_core.memory.slabs import HELD


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """Bytes of a pool at one instant; extents count with their padding.

    Attributes:
        free: no value, no promise.
        clean: visible, and leaving them loses nothing but the hit.
        dirty: visible, not in a lower tier yet.
        reserved: promised to a writer.
        quarantined: invisible, but somebody may still touch it.
        leased: part of clean and dirty that is leased (a flag, no term of the identity).
        internal: padding inside extents (part of the terms above).
        stranded: free bytes that the largest size in use cannot have.
        values: number of visible values.
        clean_short: bytes to be written ahead so that the clean reserve is met.
        dirty_refused: commits that asked for dirty beyond the cap and became clean instead.
        populated: bytes of the arena that are backed by real memory.
        usage: bytes by tenant.
    """

    capacity: int
    free: int
    clean: int
    dirty: int
    reserved: int
    quarantined: int
    leased: int
    internal: int
    stranded: int
    values: int
    clean_short: int
    dirty_refused: int
    populated: int
    usage: dict[str, int]


def take_stock(ledger: Ledger, clean_reserve: int) -> Accounting:
    """The books as they are kept; costs O(open leases)."""
    index, sums = ledger.index, ledger.sums
    leased = {slot for slot in _leases(ledger) if not index.flags[slot] & HIDDEN}
    pinned = sum(index.places[s].size for s in leased if not index.flags[s] & DIRTY)
    return Accounting(
        capacity=ledger.arena.capacity,
        free=ledger.free,
        **{state.name.lower(): sums[state] for state in State if state is not State.DONE},
        leased=sum(index.places[slot].size for slot in leased),
        internal=ledger.internal,
        stranded=ledger.slabs.stranded(max(ledger.slabs.sizes(), default=1)),
        values=index.visible_count,
        clean_short=max(0, clean_reserve - (ledger.free + sums[State.CLEAN] - pinned)),
        dirty_refused=ledger.dirty_refused,
        populated=ledger.arena.populated,
        usage=dict(ledger.usages),
    )


def check(ledger: Ledger) -> None:
    """Assert the capacity identity and every sum from the records themselves."""
    index = ledger.index
    sums: Counter[State] = Counter()
    usages: Counter[str] = Counter()
    internal = 0
    users: dict[tuple[int, int], int] = {}
    leases = _leases(ledger)
    for slot in index.slots():
        slab, flags = index.places[slot], index.flags[slot]
        assert index.visible(slot) != bool(flags & HIDDEN), f"slot {slot}: hidden and visible"
        assert index.leases[slot] or not flags & HIDDEN, f"slot {slot}: dropped, unleased, kept"
        assert index.leases[slot] == leases[slot], f"slot {slot}: lease count"
        visible = State.DIRTY if flags & DIRTY else State.CLEAN
        sums[State.QUARANTINED if flags & HIDDEN else visible] += slab.size
        usages[index.tenant_name(slot)] += slab.size
        internal += slab.size - index.nbytes[slot]
        users[id(slab), index.positions[slot]] = slot
    for owner, record in ledger.owners.items():
        assert record.rights, f"{owner!r} holds nothing"
        for right in record.rights:
            assert right.owner == owner, f"{right!r} belongs to another owner"
            if isinstance(right, Leases):
                assert right.left == len(right) - right.slots.count(-1) > 0, f"{owner!r}: leases"
                continue
            assert right.state is not State.DONE, f"{right!r} has ended"
            pending = ledger.pending.get(right.key) is right
            assert pending == (right.state is State.RESERVED), f"{right!r}: pending"
            sums[right.state] += right.slab.size
            internal += right.slab.size - right.nbytes
            users[id(right.slab), right.position] = HELD
            usages[right.tenant] += right.slab.size
    arena, slabs = ledger.arena, ledger.slabs
    slabs.check()
    for slab in slabs.slabs():
        for position, user in enumerate(slab.users):
            assert user == users.pop((id(slab), position), -1), f"extent of {user}"
    assert ledger.lent == sum(leases.values()), "open leases miscounted"
    assert not users, "extents outside all slabs"
    assert [sums[State(n)] for n in range(State.DONE)] == ledger.sums, f"{sums} found"
    unborn = arena.capacity - arena.reserved
    free = slabs.free + slabs.lost + unborn
    assert sum(sums.values()) + free == arena.capacity, "capacity identity"
    assert (usages, internal) == (ledger.usages, ledger.internal), "usage by tenant, padding"
    assert sums[State.DIRTY] <= ledger.dirty_cap, "more dirty than allowed"
    ledger.policy.check()


def _leases(ledger: Ledger) -> Counter[int]:
    """How often each slot is leased."""
    rights = (right for record in ledger.owners.values() for right in record.rights)
    batches = [right for right in rights if isinstance(right, Leases)]
    return Counter(slot for batch in batches for slot in batch.slots if slot >= 0)
