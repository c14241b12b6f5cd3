"""Second part of the storage manager: finding values in all tiers and bringing them up."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core import frame
from lmcache_core.memory.leases import Leases
from lmcache_core.spi import Interior, Key, KVSpec, Refusal, Reservation, SegmentSpec
from lmcache_core.storage.flights import Done
from lmcache_core.storage.locating import locate
from lmcache_core.storage.resident import Resident
from lmcache_core.storage.results import Flushed, Loaded, Lookup, Outcome, Place, Reason


class Serving(Resident):
    """Coroutines of the loop the manager was opened on."""

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
