"""Tiers in configuration order behind one set of verbs; the resident one is where every value is used.

A value is one *frame* everywhere: header room and payload, contiguous in one extent of the resident pool.
The writer reserves, fills the payload, seals the header and commits; from then on the value is visible and
the manager carries the very same bytes to lower tiers. A reader leases; what lies in lower tiers is read into
a fresh extent first, verified, and becomes visible like any other value.

The verbs that touch only resident memory are plain calls: thread-safe, no wait, no other thread involved.
Everything else is a coroutine of the one event loop the manager was opened on. Misses, refusals and
deadlines are values; a coroutine raises ``Closed`` after ``aclose`` and nothing else.

Deadlines are times of ``context.clock``; None stands for the deadlines of the tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lmcache_core import frame
from lmcache_core.config import Config
from lmcache_core.memory.leases import Held, Leases
from lmcache_core.memory.pool import Pool
from lmcache_core.observers import Metrics, check_identities
from lmcache_core.spi import (
    AbstractBackend,
    Closed,
    ConfigError,
    Context,
    Evicted,
    Interior,
    Key,
    KVSpec,
    Lease,
    Refusal,
    Reservation,
    SegmentSpec,
)
from lmcache_core.storage import admin, upkeep
from lmcache_core.storage.gate import Gate, Prefill
from lmcache_core.storage.loading import Done, Loader
from lmcache_core.storage.locating import locate
from lmcache_core.storage.results import (
    Flushed,
    Listing,
    Loaded,
    Lookup,
    Outcome,
    Place,
    Reason,
    Shutdown,
)
from lmcache_core.storage.tasks import Tasks, settle
from lmcache_core.storage.tier import Tier
from lmcache_core.storage.writing import Parcel, Writing

OPEN_WAIT_S = 5.0
"""How long ``open`` waits for stores that do not answer; they are tried again in the background."""
MEMORY_STATES = ("free", "clean", "dirty", "reserved", "staging", "quarantined")


class StorageManager:
    """See the module.

    Args:
        pool: resident memory. Belongs to the manager from now on, ``aclose`` closes it.
        tiers: lower tiers in lookup order, not yet opened.
        config: shares of memory, cost gate, chunk size.
        context: clock, randomness, log and ``emit``; its tier name is the name of the resident tier.
        metrics: where everything is counted.
        resident: the backend that made the pool; closed last.

    Attributes:
        pool, tiers, metrics: as given; only the manager changes them.
    """

    def __init__(
        self,
        pool: Pool,
        tiers: Sequence[Tier] = (),
        *,
        context: Context,
        config: Config | None = None,
        metrics: Metrics | None = None,
        resident: AbstractBackend | None = None,
    ) -> None:
        self.config = config or Config()
        self._resident = resident
        self.context = context
        self.pool = pool
        self.tiers: list[Tier] = []
        self.metrics = metrics or Metrics()
        self.prefill = Prefill()
        self.writing = Writing(pool, self.tiers, int(pool.capacity * self.config.manager.dirty_cap))
        self.writing.tokens = self.config.engine.chunk_size
        self.loader = Loader(pool, self.tiers, now=context.clock.now, rose=self.writing.rose)
        self.closed = False
        self.frozen = False
        self._given = list(tiers)
        self._removed: list[Tier] = []
        self._tasks = Tasks("manager", context.log)
        self._tags: dict[Key, tuple[str, ...]] = {}
        self._banned: set[Key] = set()
        self._shutdown: Shutdown | None = None

    # -- resident memory: any thread, no wait --------------------------------------------------------------

    def lookup_resident(self, keys: Sequence[Key], /) -> Sequence[int | None]:
        """Frame length of each resident value; no lease, no touch, not counted as a lookup."""
        return self.pool.lengths(keys)

    def lease(self, keys: Sequence[Key], owner: object, /, *, tokens: int = 0) -> Leases:
        """Lease those values that are resident and touch them, last key first; None for the others."""
        leases = self.pool.lease(keys, owner)
        if keys:
            self._count(len(keys), leases.left, tokens)
            if leases.left:
                self.writing.touched(keys)
        return leases

    def release(self, leases: Sequence[Lease | None], /) -> None:
        """End leases; twice is harmless. What ``lease`` returned is best given back whole."""
        self.pool.release(leases)

    def hint(self, keys: Sequence[Key], /) -> None:
        """Somebody expects these values to be used again."""
        self.pool.hint(keys)

    def reserve(
        self,
        wants: Sequence[tuple[Key, int]],
        owner: object,
        /,
        *,
        tenant: str = "",
        cost: float = 1.0,
        tags: Sequence[str] = (),
    ) -> Sequence[Reservation | Refusal]:
        """Promise memory for frames of the given lengths (header room included), in order.

        Args:
            owner: whose reservations these are; ``abort`` or ``commit`` ends each, time never does.
            cost: of recomputing one of them, for policies that weigh it.
            tags: labels for ``invalidate``; the writer seals the same ones into the frame's header.
        """
        if self.frozen or self.closed:
            there = self.pool.lengths([key for key, _ in wants])
            return [Refusal.UNWANTED if nbytes is None else Refusal.PRESENT for nbytes in there]
        granted = self.pool.reserve(wants, owner, tenant=tenant, cost=cost)
        if tags:
            self._tags.update((each.key, tuple(tags)) for each in granted if isinstance(each, Held))
        if granted and granted[-1] is Refusal.FULL:
            self.writing.hurry()
        return granted

    def commit(self, reservation: Reservation, identity: bytes, /) -> bool:
        """Make a filled, sealed frame visible at once; tiers that want it get it in the background.

        Args:
            identity: ``Header.identity`` of the sealed frame.

        Returns False when the reservation had ended meanwhile (aborted, invalidated): nothing is visible.
        """
        return self.commit_batch((reservation,), (identity,))[0]

    def commit_batch(
        self, reservations: Sequence[Reservation], identities: Sequence[bytes], /
    ) -> list[bool]:
        """``commit`` for chunks of one prefix, root first, that share their tags."""
        tags: tuple[str, ...] = ()
        if self._tags:
            tags = max((self._tags.pop(each.key, ()) for each in reservations), key=len, default=())
            if self._banned:
                for each in reservations:
                    if each.key in self._banned:
                        self._banned.discard(each.key)
                        self.pool.abort(each)
        if not self.writing.first or not self.tiers:
            return self.pool.commit_batch(reservations, identities, tags=tags)
        fits = self.writing.fitting([each.extent.nbytes for each in reservations])
        done: list[bool] = []
        for part, dirty in ((slice(fits, None), False), (slice(fits), True)):  # leaves first
            good = self.pool.commit_batch(
                reservations[part], identities[part], dirty=dirty, tags=tags
            )
            done[:0] = good
            self.writing.committed([
                (each.key, Parcel(each.nbytes, each.tenant, each.cost, tags, dirty, not dirty))
                for each, visible in zip(reservations[part], good, strict=True)
                if visible and isinstance(each, Held)
            ])  # fmt: skip
        return done

    def abort(self, reservation: Reservation, /) -> None:
        """Give the memory back; idempotent."""
        self._tags.pop(reservation.key, None)
        self.pool.abort(reservation)

    def evicted(self, keys: Sequence[Key], nbytes: int, /) -> None:
        """The pool's ``on_evict``."""
        name = self.context.tier
        self.metrics.add("lmcache_tier_evicted_chunks_total", len(keys), tier=name)
        self.context.emit(Evicted(tier=name, count=len(keys), nbytes=nbytes))

    def report_prefill(self, tokens: int, seconds: float, /) -> None:
        """The engine tells how long it took to compute ``tokens``; feeds the cost gate."""
        self.prefill.note(tokens, seconds)

    # -- all tiers: coroutines of the manager's loop ---------------------------------------------------------

    async def open(self) -> None:
        """Open the tiers, in order, and start serving; a tier that does not answer is an ailing tier.

        Raises:
            ConfigError: a tier's configuration cannot work here. What was opened is closed again.
        """
        opening = [self._tasks.start("open", self._admit(tier)) for tier in self._given]
        self.tiers += self._given
        for task in opening:
            await settle(task, None)
        errors = [error for task in opening if (error := task.exception()) is not None]
        if errors:
            await self.aclose(deadline=self.context.clock.now() + OPEN_WAIT_S)
            raise errors[0]

    async def _admit(self, tier: Tier) -> None:
        tier.metrics = self.metrics
        tier.gate = Gate(self.prefill, self.context.random, enabled=self.config.manager.cost_gate)
        tier.quarantine.limit = int(self.pool.capacity * self.config.manager.quarantine)
        await tier.open(OPEN_WAIT_S)
        self.writing.attach(tier)

    async def lookup(
        self, keys: Sequence[Key], /, *, deadline: float | None = None, tokens: int = 0
    ) -> Lookup:
        """Tell where each value is, without moving or leasing it.

        Local tiers answer from the manager's own index. Others are asked in one call per tier, within
        the least of ``deadline``, the tier's own, and the configured share of the predicted prefill.

        Args:
            tokens: of one chunk, for counters and the cost gate; 0 for the configured chunk size.
        """
        self._open()
        tokens = tokens or self.config.engine.chunk_size
        name = self.context.tier
        places = [None if n is None else Place(name, n) for n in self.pool.lengths(keys)]
        rest = [at for at, place in enumerate(places) if place is None]
        self._count(len(keys), len(keys) - len(rest), tokens)
        found, unanswered = await locate(
            self.tiers, [keys[at] for at in rest], deadline=deadline,
            budget=self._budget(len(keys) * tokens), tokens=tokens, now=self.context.clock.now,
        )  # fmt: skip
        for at, place in zip(rest, found, strict=True):
            if place is not None:
                places[at] = Place(place[0].name, place[1].nbytes, place[1].promise)
        return Lookup(tuple(places), tuple(unanswered))

    async def load(
        self,
        keys: Sequence[Key],
        owner: object,
        /,
        *,
        deadline: float | None = None,
        tokens: int = 0,
        tenant: str = "",
        done: Done | None = None,
    ) -> Loaded:
        """Bring values into resident memory and lease them: *n* good leading ones, then the reason.

        Equal loads in flight are one load. What misses the deadline goes on for others who wait for it and
        is otherwise cancelled; cancelling the coroutine releases what it had leased.

        Args:
            done: called with position and lease of each chunk, in order, as soon as it may be read.
        """
        if self.closed:
            return Loaded((), Reason.CLOSED)
        leases = self.lease(keys, owner, tokens=tokens)
        if leases.left == len(keys) and done is None:
            return Loaded(leases, Reason.COMPLETE)  # type: ignore[arg-type]  # none of them is None
        return await self.complete(
            keys, owner, leases, deadline=deadline, tokens=tokens, tenant=tenant, done=done
        )

    async def prefetch(
        self,
        keys: Sequence[Key],
        owner: object,
        /,
        *,
        deadline: float | None = None,
        tokens: int = 0,
        tenant: str = "",
    ) -> Loaded:
        """``load`` within the share of memory set aside for prefetching (``FULL`` beyond it)."""
        if self.closed:
            return Loaded((), Reason.CLOSED)
        leases = self.lease(keys, owner, tokens=tokens)
        share = int(self.pool.capacity * self.config.manager.prefetch)
        loaded = await self.complete(
            keys, owner, leases, deadline=deadline, tokens=tokens, tenant=tenant, share=share
        )
        name = self.context.tier
        self.metrics.add("lmcache_tier_prefetched_chunks_total", len(loaded.leases), tier=name)
        return loaded

    async def complete(
        self,
        keys: Sequence[Key],
        owner: object,
        leases: Leases,
        /,
        *,
        deadline: float | None = None,
        tokens: int = 0,
        tenant: str = "",
        done: Done | None = None,
        share: int | None = None,
    ) -> Loaded:
        """The second half of ``load``: bring up what ``lease`` did not find. Takes over the leases."""
        tokens = tokens or self.config.engine.chunk_size
        budget = self._budget(len(keys) * tokens)
        return await self.loader.load(
            keys, owner, leases, deadline=deadline, budget=budget, tokens=tokens, tenant=tenant,
            share=share, done=done,
        )  # fmt: skip

    async def store(
        self,
        items: Sequence[tuple[Key, memoryview]],
        /,
        *,
        deadline: float | None = None,
        tenant: str = "",
        cost: float = 1.0,
        tags: Sequence[str] = (),
    ) -> Sequence[Outcome]:
        """For tools: frame opaque payloads, commit them, and wait for the write-through tiers."""
        self._open()
        outcomes, held, identities = list[Outcome](), list[Reservation](), list[bytes]()
        header = frame.header_nbytes(1, tags=tags)
        wants = [(key, header + payload.nbytes) for key, payload in items]
        grants = self.reserve(wants, self, tenant=tenant, cost=cost, tags=tags)
        for (key, payload), grant in zip(items, grants, strict=True):
            if isinstance(grant, Refusal):
                there = grant in (Refusal.PRESENT, Refusal.PENDING)
                outcomes.append(Outcome.PRESENT if there else Outcome.REFUSED)
                continue
            segment = (SegmentSpec(0, 0, 0, payload.nbytes),)
            spec = KVSpec("uint8", self.config.engine.chunk_size, 1, 0, 0, Interior.PAGE, segment)
            grant.view[header:] = payload
            sealed = frame.seal_value(
                grant.view[:header], grant.view[header:], key, spec=spec, tags=tags
            )
            held.append(grant)
            identities.append(sealed.identity)
            outcomes.append(Outcome.STORED)
        self.commit_batch(held, identities)
        await self.writing.flush(self._left(deadline), through=True)
        return outcomes

    async def load_into(
        self, keys: Sequence[Key], into: Sequence[memoryview], /, *, deadline: float | None = None
    ) -> int:
        """For tools: load and copy payloads into buffers of exactly their length; counts the leading good ones."""
        loaded = await self.load(keys, self, deadline=deadline)
        count = 0
        for lease, target in zip(loaded.leases, into, strict=False):
            header = frame.open_header(lease.view, lease.key)
            payload = lease.view[header.nbytes : header.nbytes + header.stored_nbytes]
            if target.nbytes != payload.nbytes:
                break
            target[:] = payload
            count += 1
        self.pool.release(loaded.leases)
        return count

    async def delete(self, keys: Sequence[Key], /, *, deadline: float | None = None) -> int:
        """Forget values everywhere and count the copies there were; leases already given stay good."""
        self._open()
        return await admin.delete(self, keys, deadline)

    async def copy(
        self, keys: Sequence[Key], source: str, target: str, /, *, deadline: float | None = None
    ) -> int:
        """Copy values between two tiers by name; counts those that are in the target afterwards."""
        self._open()
        return len(await admin.copy(self, keys, source, target, deadline))

    async def move(
        self, keys: Sequence[Key], source: str, target: str, /, *, deadline: float | None = None
    ) -> int:
        """``copy``, then forget in the source what has arrived."""
        self._open()
        arrived = await admin.copy(self, keys, source, target, deadline)
        await admin.delete(self, arrived, deadline, only=source)
        return len(arrived)

    async def clear(
        self,
        wanted: Callable[[Key], bool] = lambda key: True,
        /,
        *,
        tier: str | None = None,
        deadline: float | None = None,
    ) -> int:
        """Forget the values ``wanted``, of one tier or of all; counts the copies there were.

        They are invisible before the first deletion begins; serving goes on meanwhile.
        """
        self._open()
        return await admin.clear(self, wanted, tier, deadline)

    async def invalidate(self, tag: str, /, *, deadline: float | None = None) -> int:
        """Delete every value stored under a tag, by this process or an earlier one; counts the copies.

        What is being written under the tag right now will not become visible.
        """
        self._open()
        for key, tags in list(self._tags.items()):
            if tag in tags:
                self._banned.add(key)
        return await admin.invalidate(self, tag, deadline)

    async def list(
        self,
        tier: str,
        /,
        *,
        space: bytes | None = None,
        after: str | None = None,
        limit: int = 1000,
    ) -> Listing:
        """Name values of one tier, optionally of one key space."""
        self._open()
        return await admin.listing(self, tier, space, after, limit)

    async def flush(self, *, deadline: float | None = None) -> Flushed:
        """Write everything that is still only in memory to the tiers that want it; tells what is left."""
        await self.writing.flush(self._left(deadline))
        return Flushed(len(self.writing.books.pending), self.writing.books.nbytes)

    def freeze(self) -> None:
        """Accept no new values and write none until ``unfreeze``; reads go on."""
        self.frozen = self.writing.books.frozen = True

    def unfreeze(self) -> None:
        self.frozen = False
        self.writing.unfreeze()

    async def add_tier(self, tier: Tier, /, *, position: int | None = None) -> None:
        """Open a tier and serve from it; ``position`` counts from the first lower tier, default last.

        Raises:
            ConfigError: its name is taken, or its configuration cannot work here.
        """
        self._open()
        if tier.name in (self.context.tier, *(each.name for each in self.tiers)):
            raise ConfigError(f"there is a tier {tier.name!r} already; give this one another name")
        await self._admit(tier)
        self.tiers.insert(len(self.tiers) if position is None else position, tier)

    async def remove_tier(self, name: str, /, *, deadline: float | None = None) -> Shutdown:
        """Stop serving from a tier, write what it still wants, and close it."""
        self._open()
        tier = self.tier(name)
        if (writer := self.writing.writers.get(tier)) is not None:
            await writer.drained(self._left(deadline)())
        self.tiers.remove(tier)
        until = deadline or self.context.clock.now() + self.config.manager.close_timeout
        parked, trouble = await tier.close(until)
        self.writing.detach(tier)
        self._removed.append(tier)
        return Shutdown({name: parked} if parked else {}, 0, {name: trouble} if trouble else {})

    async def set_limit(self, name: str, nbytes: int, /) -> None:
        """Change a tier's byte limit; a smaller one evicts at once.

        Raises:
            ConfigError: no such tier, or it has no limit of ours.
        """
        self._open()
        tier = self.tier(name)
        if tier.holdings is None:
            raise ConfigError(f"tier {name!r} is shared: its limit is set at the store")
        tier.set_limit(nbytes)
        await upkeep.shrink(tier, None)

    def tier(self, name: str, /) -> Tier:
        """A lower tier by name.

        Raises:
            ConfigError: there is none.
        """
        for tier in self.tiers:
            if tier.name == name:
                return tier
        known = ", ".join(tier.name for tier in self.tiers) or "none"
        raise ConfigError(f"there is no lower tier {name!r}; there are: {known}")

    async def aclose(self, *, deadline: float | None = None) -> Shutdown:
        """Refuse new work, flush, close the tiers, and be back in time whatever they do. Idempotent."""
        if self._shutdown is not None:
            return self._shutdown
        now = self.context.clock.now
        until = now() + self.config.manager.close_timeout if deadline is None else deadline
        self.closed = True
        await self.writing.flush(self._left(now() + (until - now()) / 2))
        unwritten = self.writing.books.nbytes
        closing = {tier: self._tasks.start("close", tier.close(until)) for tier in self.tiers}
        errors: dict[str, str] = {}
        parked: dict[str, int] = {}
        parked.update(
            (tier.name, tier.quarantine.nbytes) for tier in self._removed if tier.quarantine.nbytes
        )
        for tier, task in closing.items():
            if not await settle(task, until - now() + 0.1):
                errors[tier.name] = "did not close in time"
            elif task.result()[1]:
                errors[tier.name] = task.result()[1]
            if tier.quarantine.nbytes:
                parked[tier.name] = tier.quarantine.nbytes
            self.writing.detach(tier)
        await self._tasks.stop(max(0.0, until - now()))
        stock = self.pool.accounting()
        if not (stock.reserved or stock.staging or stock.quarantined or stock.leased):
            # Otherwise somebody may still touch the memory, and the mapping stays.
            self.pool.close()
            if self._resident is not None:
                await self._resident.aclose()
        self._shutdown = Shutdown(parked, unwritten, errors)
        return self._shutdown

    # -- inspection ------------------------------------------------------------------------------------------

    def measure(self) -> None:
        """Bring the gauges up to date; exporters call it before they read."""
        stock, name = self.pool.accounting(), self.context.tier
        for state in MEMORY_STATES:
            self.metrics.set("lmcache_memory_bytes", getattr(stock, state), tier=name, state=state)
        self.metrics.set("lmcache_memory_capacity_bytes", stock.capacity, tier=name)
        self.metrics.set("lmcache_memory_leased_bytes", stock.leased, tier=name)
        for tier in self.tiers:
            tier.publish()

    def check(self) -> None:
        """Assert the invariants of memory, limits and counters."""
        self.pool.check()
        for tier in self.tiers:
            if tier.holdings is not None and tier.complete.is_set():
                tier.holdings.check()
        self.writing.books.check()
        self.measure()
        broken = check_identities(self.metrics.snapshot())
        assert not broken, broken

    def tasks(self) -> Iterator[Tasks]:
        """Owners of all background tasks."""
        yield self._tasks
        yield from (tier.tasks for tier in (*self.tiers, *self._removed))

    def _open(self) -> None:
        if self.closed:
            raise Closed("the storage manager is closed")

    def _left(self, deadline: float | None) -> Callable[[], float | None]:
        now = self.context.clock.now
        return lambda: None if deadline is None else deadline - now()

    def _budget(self, tokens: int) -> float | None:
        predicted = self.prefill.seconds(tokens)
        if predicted is None or not self.config.manager.cost_gate:
            return None
        return self.context.clock.now() + predicted * self.config.manager.lookup_budget

    def _count(self, asked: int, hits: int, tokens: int) -> None:
        tokens = tokens or self.config.engine.chunk_size
        add, name = self.metrics.add, self.context.tier
        add("lmcache_tier_asked_chunks_total", asked, tier=name)
        add("lmcache_tier_hit_chunks_total", hits, tier=name)
        add("lmcache_tier_missed_chunks_total", asked - hits, tier=name)
        add("lmcache_tier_asked_tokens_total", asked * tokens, tier=name)
        add("lmcache_tier_hit_tokens_total", hits * tokens, tier=name)
        add("lmcache_tier_missed_tokens_total", (asked - hits) * tokens, tier=name)
