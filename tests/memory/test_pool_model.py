"""A pool against a model of it: any order of calls keeps the identity, the bytes and the rights."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from lmcache_core.memory.leases import Held, Leases, Loan, State
from lmcache_core.memory.pool import Pool
from lmcache_core.spi import Key, Refusal
from tests.memory.pools import IDENTITY, PAGE, content, key, make_pool

CAPACITY, QUOTA = 40 * PAGE, 12 * PAGE
OWNERS = ("a", "b", "c")
SIZES = (1, PAGE, PAGE + 1, 3 * PAGE, 7 * PAGE - 5)

NUMBERS = 30
numbers = st.integers(0, NUMBERS - 1)
prefixes = st.builds(
    lambda start, n: list(range(start, min(start + n, NUMBERS))), numbers, st.integers(0, 8)
)
wishes = prefixes | st.lists(numbers, max_size=4)
owners = st.sampled_from(OWNERS)


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


class PoolMachine(RuleBasedStateMachine):
    """What the pool must remember, in plain sets; what it may evict is read back from it."""

    reservations = Bundle("reservations")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[Key] = []
        self.time = 0.0
        self.pool: Pool = make_pool(
            CAPACITY,
            segment_nbytes=18 * PAGE,
            quotas={"small": QUOTA},
            quarantine_share=0.5,
            clean_share=0.4,
            now=lambda: self.time,
            on_evict=lambda gone, nbytes: self.evicted.extend(gone),
        )
        self.loans: list[tuple[Loan, bytes]] = []
        self.held: list[Held] = []

    @rule(
        target=reservations,
        wanted=wishes,
        owner=owners,
        tenant=st.sampled_from(["", "small"]),
    )
    def reserve(self, wanted: list[int], owner: str, tenant: str) -> list[Held]:
        names = [key(number) for number in wanted]
        before = dict(zip(names, self.pool.lengths(names), strict=True))
        pending = {held.key for held in self.held if held.state is State.RESERVED}
        answers = self.pool.reserve(
            [(key(number), size_of(number)) for number in wanted], owner, tenant=tenant
        )
        full = False
        for name, answer in zip(names, answers, strict=True):
            if before[name] is not None:
                assert answer is Refusal.PRESENT
            elif name in pending:
                assert answer is Refusal.PENDING
            elif isinstance(answer, Held):
                assert not full, "a grant after the first refusal for want of room"
                pending.add(name)
                answer.view[:] = content(name, answer.nbytes)
            else:
                full = full or answer is Refusal.FULL
                assert answer is not Refusal.UNWANTED or tenant or self.over_cap(owner)
        for name in names:
            assert before[name] is None or self.pool.lengths([name]) == [before[name]]
        granted = [answer for answer in answers if isinstance(answer, Held)]
        self.held += granted
        return granted

    @rule(wanted=prefixes, owner=owners, tenant=st.sampled_from(["", "small"]), dirty=st.booleans())
    def put(self, wanted: list[int], owner: str, tenant: str, dirty: bool) -> None:
        self.commit(self.reserve(wanted, owner, tenant), dirty, {"x"} if dirty else set(), None)

    @rule(wanted=prefixes)
    def read(self, wanted: list[int]) -> None:
        with_lease = self.pool.lease([key(number) for number in wanted], "reader")
        for loan in self.remember(with_lease):
            assert loan is None or loan.view == content(loan.key, loan.extent.nbytes)
        self.pool.release(with_lease)

    @rule(
        batch=reservations,
        dirty=st.booleans(),
        tags=st.sets(st.sampled_from("xy")),
        lifetime=st.none() | st.integers(0, 3),
    )
    def commit(self, batch: list[Held], dirty: bool, tags: set[str], lifetime: int | None) -> None:
        open_before = [held.state is State.RESERVED for held in batch]
        expires = None if lifetime is None else self.time + lifetime
        done = self.pool.commit_batch(
            batch, [IDENTITY] * len(batch), dirty=dirty, tags=tags, expires=expires
        )
        assert done == open_before
        assert all(held.state is State.DONE for held in batch)

    @rule(batch=reservations)
    def abort(self, batch: list[Held]) -> None:
        for held in batch:
            self.pool.abort(held)

    @rule(batch=reservations)
    def quarantine(self, batch: list[Held]) -> None:
        for held in batch:
            self.pool.quarantine(held)

    @rule(target=leases, wanted=wishes, owner=owners)
    def lease(self, wanted: list[int], owner: str) -> Leases:
        names = [key(number) for number in wanted]
        there = self.pool.lengths(names)
        barred = self.over_cap(owner)
        batch = self.pool.lease(names, owner)
        assert [loan is not None for loan in batch] == [
            length is not None and not barred for length in there
        ]
        return self.remember(batch)

    @rule(target=leases, batch=leases, owner=owners, whole=st.booleans())
    def share(self, batch: Leases, owner: str, whole: bool) -> Leases:
        there = [loan is not None for loan in batch]
        shared = self.pool.share(batch if whole else [*batch], owner)
        assert [loan is not None for loan in shared] == there
        return self.remember(shared)

    @rule(batch=leases, piece=st.none() | st.integers(0, 4))
    def release(self, batch: Leases, piece: int | None) -> None:
        self.pool.release(batch if piece is None else batch[piece : piece + 2])

    @rule(picked=st.integers(0, 30))
    def release_again(self, picked: int) -> None:
        loans = [loan for loan, _ in self.loans[-picked:]]
        self.pool.release([*loans, *loans])
        assert not any(loan.held for loan in loans)

    @rule(wanted=wishes)
    def drop(self, wanted: list[int]) -> None:
        names = [key(number) for number in wanted]
        there = {name for name, n in zip(names, self.pool.lengths(names), strict=True) if n}
        assert self.pool.drop(names) == len(there)
        assert self.pool.lengths(names) == [None] * len(names)

    @rule(tag=st.sampled_from("xy"))
    def drop_tag(self, tag: str) -> None:
        self.pool.drop_tag(tag)
        assert self.pool.drop_tag(tag) == 0

    @rule(wanted=wishes)
    def write_back(self, wanted: list[int]) -> None:
        before = self.pool.accounting()
        self.pool.mark_clean([key(number) for number in wanted])
        after = self.pool.accounting()
        assert after.dirty <= before.dirty
        assert after.dirty + after.clean == before.dirty + before.clean

    @rule(wanted=wishes)
    def touch(self, wanted: list[int]) -> None:
        self.pool.touch([key(number) for number in wanted])
        self.pool.hint([key(number) for number in wanted])

    @rule()
    def wait(self) -> None:
        self.time += 1

    @rule(owner=owners, proof=st.booleans())
    def close_owner(self, owner: str, proof: bool) -> None:
        left = self.pool.close_owner(owner, proof=proof)
        assert not (proof and left)
        for held in self.held:
            assert held.owner != owner or held.state is not State.RESERVED
            assert held.owner != owner or not proof or held.state is State.DONE
        if proof:
            assert not any(loan.owner == owner and loan.held for loan, _ in self.loans)

    @invariant()
    def the_books_are_true(self) -> None:
        self.pool.check()
        stock = self.pool.accounting()
        terms = (stock.free, stock.clean, stock.dirty, stock.reserved)
        assert sum(terms) + stock.quarantined == stock.capacity == CAPACITY
        assert min(terms) >= 0
        assert stock.usage.get("small", 0) <= QUOTA
        assert self.pool.short_of_clean == (stock.clean_short > 0)

    @invariant()
    def held_memory_is_nobody_elses(self) -> None:
        """What a lease shows is right for ever, and what a writer may still write is seen by no lease."""
        places: list[tuple[int, int, int]] = []
        for held in self.held:
            if held.state is not State.DONE:
                extent = held.extent
                places.append((extent.segment, extent.base, extent.base + extent.nbytes))
        read = set()
        for loan, expected in self.loans:
            if loan.held:
                assert loan.view == expected
                assert loan.identity == IDENTITY
                extent = loan.extent
                read.add((extent.segment, extent.base, extent.base + extent.nbytes))
        places.sort()
        everything = sorted([*places, *read])
        for (segment, _, end), (other, base, _) in pairwise(everything):
            assert segment != other or end <= base, "two owners of one place"

    def teardown(self) -> None:
        for owner in OWNERS:
            self.pool.close_owner(owner, proof=True)
        self.pool.check()
        stock = self.pool.accounting()
        assert (stock.reserved, stock.quarantined, stock.leased) == (0, 0, 0)
        self.pool.drop([key(number) for number in range(NUMBERS)])
        assert self.pool.accounting().free == CAPACITY
        self.pool.close()

    def remember(self, batch: Leases) -> Leases:
        for loan in batch:
            if loan is not None:
                nbytes = loan.extent.nbytes
                self.loans.append((loan, content(loan.key, nbytes)))
        return batch

    def over_cap(self, owner: str) -> bool:
        return self.pool._barred(owner)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
