"""Random histories of a storage manager: one seed, one history, every served byte checked.

Clients store, load, look up, prefetch, delete, cancel and hold leases while operators clear, invalidate,
freeze, resize, add and remove tiers, and while the tiers below delay, fail, tear, flip and hang. Values are
drawn from their keys. After every event the capacity identity and all limits are checked; at the end nothing
may be left in flight, every request was answered by its deadline, and the counters obey their identities.
Then the manager is closed, sometimes reopened on what the tiers kept, and everything is read once more.

``python -m lmcache_core.testing.histories --seeds 2000`` prints what happened.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lmcache_core.spi import (
    Key,
    Lease,
    Refusal,
    Reservation,
)
from lmcache_core.storage.results import Reason
from lmcache_core.testing.operators import Operators
from lmcache_core.testing.simulation import run_simulated
from lmcache_core.testing.worlds import (
    PAGE,
    TAGS,
    fill,
    frame_nbytes,
    key_of,
    verify_lease,
)

CHAINS, LENGTH = 5, 6
LATE_S = 1e-3
"""How far after its deadline a request may end, in virtual seconds."""


@dataclass
class Outcome:
    """What one history did.

    Attributes:
        faults: injected faults that met something, by kind.
        digest: of every event and its time, in order.
    """

    seed: int
    operations: int = 0
    verified: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    digest: str = ""


class History(Operators):
    """One world and its clients; see the module."""

    def __init__(self, outcome: Outcome, operations: int, kinds: Sequence[str]) -> None:
        super().__init__(operations, outcome.reasons, kinds)
        self.outcome = outcome
        self.sizes = [self.source.choice((PAGE, 2 * PAGE, 999)) for _ in range(CHAINS)]
        self.events = self.cursor = 0
        self.log = hashlib.sha256()

    # -- what must hold --------------------------------------------------------------------------------------

    def note(self, *what: object) -> None:
        """An event: part of the digest; then everything must hold."""
        self.log.update(repr((self.loop.time(), what)).encode())
        self.check()

    def check(self) -> None:
        """After every event; every fourth time the books are compared with the structures themselves."""
        manager = self.manager
        stock = manager.pool.accounting()
        terms = (stock.free, stock.clean, stock.dirty, stock.reserved, stock.quarantined)
        arena, slabs = manager.pool.arena, manager.pool.slabs
        free = slabs.free + slabs.lost + arena.capacity - arena.reserved
        assert free + sum(terms[1:]) == stock.capacity and min(terms) >= 0, f"capacity: {stock}"
        self.verify_visible()
        self.events += 1
        if self.events % 4 == 0:
            self.check_books()

    def check_books(self) -> None:
        manager = self.manager
        manager.pool.check()
        for tier in manager.tiers:
            if tier.holdings is None or not tier.complete.is_set():
                continue
            if tier.name in self.resizing and tier.holdings.used > tier.limit:
                continue
            self.resizing.discard(tier.name)
            tier.holdings.check()
            used = self.places[tier.name].used()
            assert used <= tier.limit, f"{tier.name} holds {used} bytes, limit {tier.limit}"
        manager.writing.books.check()

    def verify_visible(self) -> None:
        """Visible implies verified: one value after the other, each at some event."""
        found, then = self.manager.pool.scan(self.cursor, 1)
        self.cursor = then or 0
        leases = self.manager.pool.lease([key for key, _ in found], "check", touch=False)
        for lease in leases:
            if lease is not None:
                self.verify(lease)
        self.manager.pool.release(leases)

    def verify(self, lease: Lease) -> None:
        """Assert that a value is what its key says."""
        verify_lease(lease)

    def replay(self) -> None:
        """Events and indexes add up to what is there: call it when nothing moves."""
        manager = self.manager
        snapshot = manager.metrics.snapshot()
        for name in (manager.context.tier, *(tier.name for tier in manager.tiers)):
            counted = snapshot.total("lmcache_tier_evicted_chunks_total", tier=name)
            assert self.evicted[name] == counted, f"{name}: {self.evicted[name]} of {counted} told"
        told: dict[str, set[Key]] = {}
        for tier_name, there, key in self.feed.since(0, 1 << 20) or ():
            followed = told.setdefault(tier_name, set())
            if key is None:
                followed.clear()
            else:
                (followed.add if there else followed.discard)(key)
        name = manager.context.tier
        here = {key for key, _ in manager.pool.scan(0, 1 << 20)[0]}
        assert told.get(name, set()) == here, f"changes of {name} do not add up to its contents"
        for tier in manager.tiers:
            if tier.holdings is not None and tier.complete.is_set():
                index, stored = tier.holdings.index, {*self.places[tier.name].keys()}
                known = {index.key(slot) for slot in index.slots() if index.visible(slot)}
                same = told.get(tier.name, set()) == known
                assert same, f"changes of {tier.name} do not add up to its contents"
                strays = stored.difference(known, tier.holdings.leaving)
                assert not strays, f"{tier.name} holds what it does not know: {strays}"
                gone = known - stored
                gone -= {*tier.holdings.expired([*gone], self.loop.time())}
                assert not gone, f"{tier.name} promises what it does not hold: {gone}"

    def serve(self, leases: Sequence[Lease | None]) -> None:
        for lease in leases:
            if lease is not None:
                self.verify(lease)
                self.outcome.verified += 1

    # -- clients ---------------------------------------------------------------------------------------------

    def keys(self) -> list[Key]:
        chain = self.source.randrange(CHAINS)
        return [key_of(chain * 100 + at) for at in range(self.source.randint(1, LENGTH))]

    def nbytes(self, keys: Sequence[Key]) -> int:
        chains = {key_of(chain * 100): size for chain, size in enumerate(self.sizes)}
        return chains[keys[0]]

    def answered(self, deadline: float | None) -> None:
        assert deadline is None or self.loop.time() <= deadline + LATE_S, "answered too late"

    async def client(self, name: str) -> None:
        verbs = (
            [self.store] * 5 + [self.load] * 6 + [self.lookup] * 2 + [self.cancel] * 2
            + [self.lease, self.abandon, self.prefetch]
        )  # fmt: skip
        while self.left > 0:
            self.left -= 1
            self.outcome.operations += 1
            verb = self.source.choice(verbs)
            await verb(name)
            self.note(name, verb.__name__)
            await asyncio.sleep(self.source.choice((0.0, 0.001, 0.05, 0.5)))

    async def store(self, name: str) -> None:
        keys = self.keys()
        tags = () if self.source.random() < 0.7 else (self.source.choice(TAGS),)
        room = frame_nbytes(self.nbytes(keys), tags)
        grants = self.manager.reserve(
            [(key, room) for key in keys], name, tags=tags, tenant=self.source.choice(("", "t"))
        )
        held: list[Reservation] = []
        for grant in grants:
            if isinstance(grant, Refusal):
                self.outcome.reasons[f"store {grant.value}"] += 1
            else:
                held.append(grant)
        if self.source.random() < 0.3:
            await asyncio.sleep(self.source.uniform(0, 0.5))
        if held and self.source.random() < 0.1:
            self.manager.abort(held.pop())
        self.manager.commit_batch(held, [fill(each, tags) for each in held])

    async def load(self, name: str) -> None:
        keys, deadline = self.keys(), self.deadline()
        told: list[int] = []

        def done(at: int, lease: Lease) -> None:
            told.append(at)
            verify_lease(lease)

        loaded = await self.manager.load(
            keys, name, deadline=deadline, done=done if self.source.random() < 0.3 else None
        )
        self.answered(deadline)
        self.note(loaded.reason.value, len(loaded.leases))
        self.outcome.reasons[f"load {loaded.reason.value}"] += 1
        assert (len(loaded.leases) == len(keys)) == (loaded.reason is Reason.COMPLETE)
        assert [lease.key for lease in loaded.leases] == keys[: len(loaded.leases)]
        assert told in ([], list(range(len(loaded.leases)))), told
        self.serve(loaded.leases)
        if self.source.random() < 0.5:
            await asyncio.sleep(self.source.uniform(0, 3))
            self.serve(loaded.leases)  # held memory is nobody else's
        self.manager.release(loaded.leases)

    async def prefetch(self, name: str) -> None:
        deadline = self.deadline()
        loaded = await self.manager.prefetch(self.keys(), name, deadline=deadline)
        self.answered(deadline)
        self.serve(loaded.leases)
        self.manager.release(loaded.leases)

    async def lookup(self, name: str) -> None:
        keys, deadline = self.keys(), self.deadline()
        lookup = await self.manager.lookup(keys, deadline=deadline)
        self.answered(deadline)
        assert len(lookup.places) == len(keys)

    async def lease(self, name: str) -> None:
        leases = self.manager.lease(self.keys(), name)
        self.serve(leases)
        self.manager.release(leases)

    async def cancel(self, name: str) -> None:
        task = self.loop.create_task(self.manager.load(self.keys(), name))
        await asyncio.sleep(self.source.choice((0.0, 0.001, 0.1, 1.0)))
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            self.serve(task.result().leases)
            self.manager.release(task.result().leases)

    async def abandon(self, name: str) -> None:
        """A writer that leaves: what it reserved is given back by the owner's end."""
        self.manager.reserve([(key, frame_nbytes(PAGE)) for key in self.keys()], f"{name} lost")
        await asyncio.sleep(self.source.uniform(0, 0.2))
        self.manager.pool.close_owner(f"{name} lost", proof=True)

    # -- the whole -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        names = ["a", "b", "c"][: self.source.choice((1, 2, 2, 3))]
        await self.begin(names)
        await self.work()
        if self.source.random() < 0.2:
            await self.close(hasty=True)
            return
        for place in self.places.values():
            place.calm()
        await self.quiet()
        await self.close()
        if self.source.random() < 0.5:
            self.spare.clear()
            await self.begin(names)
            for chain in range(CHAINS):
                keys = [key_of(chain * 100 + at) for at in range(LENGTH)]
                loaded = await self.manager.load(keys, "reader")
                self.serve(loaded.leases)
                self.manager.release(loaded.leases)
            await self.quiet()
            await self.close()

    async def begin(self, names: Sequence[str]) -> None:
        """Open a manager on the places."""
        self.manager = self.make_manager(names)
        await self.manager.open()

    async def work(self) -> None:
        """Clients and operator do what they do, until ``left`` is used up."""
        clients = [self.client(f"client {at}") for at in range(4)]
        await asyncio.gather(*map(self.loop.create_task, [*clients, self.operator()]))

    async def quiet(self) -> None:
        """Everything comes to rest, and then nothing is left in flight."""
        await asyncio.sleep(200)
        manager = self.manager
        await manager.flush(deadline=self.loop.time() + 100)
        await asyncio.sleep(200)
        stock = manager.pool.accounting()
        assert not manager.loader.flights, manager.loader.flights
        held = (stock.reserved, stock.quarantined, stock.leased)
        assert held == (0, 0, 0), f"reserved, quarantined, leased: {held}"
        for tier in manager.tiers:
            assert not len(tier.quarantine) and not tier.storing, f"{tier.name} has calls left"
        self.check()
        manager.check()
        self.replay()

    async def close(self, *, hasty: bool = False) -> None:
        begun = self.loop.time()
        left = await self.manager.aclose(deadline=begun + (1 if hasty else 60))
        assert self.loop.time() <= begun + (1.2 if hasty else 60.2), "closing took too long"
        if not hasty:
            assert not left.quarantined and not left.errors, left
        for place in self.places.values():
            place.calm()
        await asyncio.sleep(1000)
        for owner in self.manager.tasks():
            assert not len(owner), f"{owner.owner} has tasks left"
        for tier in self.manager.tiers:
            assert not tier.quarantine.nbytes, f"{tier.name} still parks memory"
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, f"tasks without an end: {others}"


def run_history(
    seed: int,
    /,
    *,
    operations: int = 120,
    kinds: Sequence[str] = ("memory",),
    kind: type[History] = History,
) -> Outcome:
    """Run one history.

    Args:
        operations: of clients.
        kinds: names in ``places.FACTORIES`` that tiers are drawn from.
        kind: what it is made of.

    Raises:
        AssertionError: something did not hold; the same seed finds it again.
    """
    outcome = Outcome(seed)
    begun = time.perf_counter()

    async def main() -> None:
        history = kind(outcome, operations, kinds)
        await history.run()
        for place in history.places.values():
            outcome.faults.update(place.hit())
        outcome.digest = history.log.hexdigest()

    run_simulated(main(), seed, limit=5_000_000)
    outcome.seconds = time.perf_counter() - begun
    return outcome


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=200, help="how many histories")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--operations", type=int, default=120, help="client operations in each")
    options = parser.parse_args(arguments)
    total, failed = Outcome(-1), list[int]()
    for seed in range(options.first, options.first + options.seeds):
        try:
            outcome = run_history(seed, operations=options.operations)
        except Exception as error:  # noqa: BLE001  # named boundary: CLI, the table goes on
            failed.append(seed)
            sys.stderr.write(f"seed {seed}: {type(error).__name__}: {error}\n")
            continue
        total.operations += outcome.operations
        total.verified += outcome.verified
        total.seconds += outcome.seconds
        total.reasons += outcome.reasons
    for name, count in sorted(total.reasons.items()):
        sys.stdout.write(f"{name:28} {count:9}\n")
    sys.stdout.write(
        f"{options.seeds} histories, {total.operations} operations, {total.verified} values verified, "
        f"{len(failed)} failed, {total.seconds:.1f} s\n"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
