"""First part of the storage manager: resident memory, used in place by any thread, without waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmcache_core.config import Config
from lmcache_core.memory.leases import Held, Leases
from lmcache_core.memory.pool import Pool
from lmcache_core.observers import Metrics
from lmcache_core.spi import (
    AbstractBackend,
    Closed,
    Context,
    Evicted,
    Key,
    Lease,
    Refusal,
    Reservation,
)
from lmcache_core.storage.feed import Feed
from lmcache_core.storage.gate import Prefill
from lmcache_core.storage.loading import Loader
from lmcache_core.storage.results import Shutdown
from lmcache_core.storage.tasks import Tasks
from lmcache_core.storage.tier import Tier
from lmcache_core.storage.writing import Parcel, Writing

MEMORY_STATES = ("free", "clean", "dirty", "reserved", "quarantined")
_COUNTED = [
    f"lmcache_tier_{what}_{unit}_total"
    for unit in ("chunks", "tokens")
    for what in ("asked", "hit", "missed")
]


class Resident:
    """What every verb stands on, and the verbs that touch resident memory only.

    Args:
        pool: resident memory. Belongs to the manager from now on, ``aclose`` closes it.
        tiers: lower tiers in lookup order, not yet opened.
        config: shares of memory, cost gate, chunk size.
        context: clock, randomness, log and ``emit``; its tier name is the name of the resident tier.
        metrics: where everything is counted.
        resident: the backend that made the pool; closed last.
        feed: told what comes and goes in memory and in local tiers.

    Attributes:
        pool, tiers, metrics, feed: as given; only the manager changes them.
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
        feed: Feed | None = None,
    ) -> None:
        self.config = config or Config()
        self._resident = resident
        self.context = context
        self.pool = pool
        self.tiers: list[Tier] = []
        self.metrics = metrics or Metrics()
        self._counters = self.metrics.counters(_COUNTED, tier=context.tier)
        self.prefill = Prefill()
        self.writing = Writing(pool, self.tiers, int(pool.capacity * self.config.manager.dirty_cap))
        self.writing.tokens = self.config.engine.chunk_size
        self.loader = Loader(pool, self.tiers, now=context.clock.now, rose=self.writing.rose)
        self.closed = False
        self.frozen = False
        self.feed = feed
        if feed is not None:
            pool.index.watch = feed.watch(context.tier)
        self._given = list(tiers)
        self._removed: list[Tier] = []
        self._tasks = Tasks("manager", context.log)
        self._tags: dict[Key, tuple[str, ...]] = {}
        self._banned: set[Key] = set()
        self._shutdown: Shutdown | None = None

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
        self,
        reservations: Sequence[Reservation],
        identities: Sequence[bytes],
        /,
        *,
        ttl: float | None = None,
    ) -> list[bool]:
        """``commit`` for chunks of one prefix, root first, that share their tags.

        After ``ttl`` seconds they may be forgotten, in tiers with a shorter one earlier.
        """
        expires = None if ttl is None else self.context.clock.now() + ttl
        tags: tuple[str, ...] = ()
        if self._tags:
            tags = max((self._tags.pop(each.key, ()) for each in reservations), key=len, default=())
            if self._banned:
                for each in reservations:
                    if each.key in self._banned:
                        self._banned.discard(each.key)
                        self.pool.abort(each)
        if not self.writing.first or not self.tiers:
            return self.pool.commit_batch(reservations, identities, tags=tags, expires=expires)
        fits = self.writing.fitting([each.extent.nbytes for each in reservations])
        done: list[bool] = []
        for part, dirty in ((slice(fits, None), False), (slice(fits), True)):  # leaves first
            good = self.pool.commit_batch(
                reservations[part], identities[part], dirty=dirty, tags=tags, expires=expires
            )
            done[:0] = good
            self.writing.committed([
                (each.key, Parcel(each.nbytes, self.pool.tenant(each), each.cost, tags, dirty, not dirty, ttl))
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

    def measure(self) -> None:
        """Bring the gauges up to date; exporters call it before they read."""
        stock, name = self.pool.accounting(), self.context.tier
        for state in MEMORY_STATES:
            self.metrics.set("lmcache_memory_bytes", getattr(stock, state), tier=name, state=state)
        self.metrics.set("lmcache_memory_capacity_bytes", stock.capacity, tier=name)
        self.metrics.set("lmcache_memory_leased_bytes", stock.leased, tier=name)
        for tier in self.tiers:
            tier.publish()

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
        chunks = asked, hits, asked - hits
        self._counters((*chunks, *[count * tokens for count in chunks]))
