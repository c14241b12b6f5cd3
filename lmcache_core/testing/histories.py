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
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache_core.spi import (
    BackendError,
    Key,
    Lease,
    Refusal,
    Reservation,
)
from lmcache_core.storage.manager import StorageManager
from lmcache_core.storage.results import Reason
from lmcache_core.testing.places import World
from lmcache_core.testing.simulation import SimLoop, run_simulated, sim_loop
from lmcache_core.testing.worlds import (
    PAGE,
    fill,
    frame_nbytes,
    key_of,
    verify_lease,
)

CHAINS, LENGTH = 5, 6
TAGS = ("red", "blue")
LATE_S = 1e-3
"""How far after its deadline a request may end, in virtual seconds."""


@dataclass
class Outcome:
    """What one history did."""

    seed: int
    operations: int = 0
    verified: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    faults: int = 0
    seconds: float = 0.0


class History(World):
    """One world and its clients; see the module."""

    def __init__(self, outcome: Outcome, operations: int, kinds: Sequence[str]) -> None:
        self.loop: SimLoop = sim_loop()
        super().__init__(random.Random(self.loop.random.getrandbits(64)), kinds)
        self.outcome = outcome
        self.left = operations
        self.resizing = False
        self.sizes = [self.source.choice((PAGE, 2 * PAGE, 999)) for _ in range(CHAINS)]
        self.spare: list[str] = []
        self.manager: StorageManager

    # -- what must hold --------------------------------------------------------------------------------------

    def check(self) -> None:
        """After every event."""
        manager = self.manager
        manager.pool.check()
        for tier in manager.tiers:
            if tier.holdings is None or not tier.complete.is_set() or self.resizing:
                continue
            tier.holdings.check()
            used = self.places[tier.name].used()
            assert used <= tier.limit, f"{tier.name} holds {used} bytes, limit {tier.limit}"
        manager.writing.books.check()

    def serve(self, leases: Sequence[Lease | None]) -> None:
        for lease in leases:
            if lease is not None:
                verify_lease(lease)
                self.outcome.verified += 1

    # -- clients ---------------------------------------------------------------------------------------------

    def keys(self) -> list[Key]:
        chain = self.source.randrange(CHAINS)
        return [key_of(chain * 100 + at) for at in range(self.source.randint(1, LENGTH))]

    def nbytes(self, keys: Sequence[Key]) -> int:
        chains = {key_of(chain * 100): size for chain, size in enumerate(self.sizes)}
        return chains[keys[0]]

    def deadline(self) -> float | None:
        seconds = self.source.choice((None, 0.0, 0.01, 0.3, 2.0))
        return None if seconds is None else self.loop.time() + seconds

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
            await self.source.choice(verbs)(name)
            self.check()
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

    # -- operators -------------------------------------------------------------------------------------------

    async def operator(self) -> None:
        verbs = [
            self.delete, self.delete, self.invalidate, self.clear, self.flush, self.freeze,
            self.resize, self.swap, self.copy, self.listing,
        ]  # fmt: skip
        while self.left > 0:
            await asyncio.sleep(self.source.uniform(0, 2))
            verb = self.source.choice(verbs)
            self.outcome.reasons[f"operator {verb.__name__}"] += 1
            try:
                await verb()
            except BackendError:
                self.outcome.reasons[f"operator {verb.__name__} incomplete"] += 1
            self.check()

    async def delete(self) -> None:
        await self.manager.delete(self.keys(), deadline=self.deadline())

    async def invalidate(self) -> None:
        await self.manager.invalidate(self.source.choice(TAGS), deadline=self.deadline())

    async def clear(self) -> None:
        digit = self.source.randrange(4)
        wanted: Any = lambda key: key.digest[0] % 4 == digit  # noqa: E731
        await self.manager.clear(wanted, deadline=self.deadline())

    async def flush(self) -> None:
        deadline = self.deadline()
        await self.manager.flush(deadline=deadline or self.loop.time() + 5)

    async def freeze(self) -> None:
        self.manager.freeze()
        await asyncio.sleep(self.source.uniform(0, 1))
        self.manager.unfreeze()

    async def resize(self) -> None:
        local = [tier for tier in self.manager.tiers if tier.holdings is not None]
        if local:
            tier = self.source.choice(local)
            self.resizing = True
            await self.manager.set_limit(tier.name, self.source.choice((6, 12, 40)) * 3 * PAGE)
            self.resizing = tier.holdings is not None and tier.holdings.used > tier.limit

    async def swap(self) -> None:
        """Take a tier out, or put one in that was out (with what it kept)."""
        if self.spare and self.source.random() < 0.7:
            name = self.spare.pop()
            await self.manager.add_tier(self.make_tier(name), position=self.source.randrange(2))
        elif len(self.manager.tiers) > 1:
            tier = self.source.choice(self.manager.tiers)
            left = await self.manager.remove_tier(tier.name, deadline=self.loop.time() + 3)
            if not left.errors:
                self.spare.append(tier.name)

    async def copy(self) -> None:
        if len(self.manager.tiers) > 1:
            one, two = self.source.sample([tier.name for tier in self.manager.tiers], 2)
            verb = self.source.choice((self.manager.copy, self.manager.move))
            await verb(self.keys(), one, two, deadline=self.loop.time() + 2)

    async def listing(self) -> None:
        for name in ("cpu", *(tier.name for tier in self.manager.tiers)):
            after: str | None = None
            while True:
                page = await self.manager.list(name, after=after, limit=7)
                after = page.after
                if after is None:
                    break

    # -- the whole -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        names = ["a", "b", "c"][: self.source.choice((1, 2, 2, 3))]
        self.manager = self.make_manager(names)
        await self.manager.open()
        clients = [self.loop.create_task(self.client(f"client {i}")) for i in range(4)]
        await asyncio.gather(*clients, self.loop.create_task(self.operator()))
        if self.source.random() < 0.2:
            await self.close(hasty=True)
            return
        for place in self.places.values():
            place.calm()
        await self.quiet()
        await self.close()
        if self.source.random() < 0.5:
            self.manager = self.make_manager(names)
            self.spare.clear()
            await self.manager.open()
            for chain in range(CHAINS):
                keys = [key_of(chain * 100 + at) for at in range(LENGTH)]
                loaded = await self.manager.load(keys, "reader")
                self.serve(loaded.leases)
                self.manager.release(loaded.leases)
            await self.quiet()
            await self.close()

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
    seed: int, /, *, operations: int = 120, kinds: Sequence[str] = ("memory",)
) -> Outcome:
    """Run one history.

    Args:
        operations: of clients.
        kinds: names in ``places.FACTORIES`` that tiers are drawn from.

    Raises:
        AssertionError: something did not hold; the same seed finds it again.
    """
    outcome = Outcome(seed)
    begun = time.perf_counter()

    async def main() -> None:
        await History(outcome, operations, kinds).run()

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
