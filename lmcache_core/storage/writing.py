"""Carrying values down: one writer per tier, a bounded queue, and nobody upstairs ever waits for it.

A committed value that some tier wants is *dirty* until the last of them has it: dirty values are not evicted.
Their bytes are capped (``dirty_cap``); beyond the cap a new value is not queued and that is counted. Tiers
written through or back are written at once; ``on-evict`` tiers only when memory runs short of clean values,
oldest first, so that a reservation finds something that may leave; beyond the cap they are written at once
too. What fails is tried ``ATTEMPTS`` times, then given up: the cache loses a copy, never its footing.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lmcache_core import frame
from lmcache_core.config import WritePolicy
from lmcache_core.memory.pool import Pool
from lmcache_core.spi import Key
from lmcache_core.storage.storing import store
from lmcache_core.storage.tasks import settle

if TYPE_CHECKING:
    from lmcache_core.storage.tier import Tier

BATCH = 16
BATCH_NBYTES = 64 << 20
ATTEMPTS = 5
TOUCHES = 256
"""Batches of uses remembered for the loop; more are forgotten, they only steer policies."""
UNTOUCHED = 1 << 14
"""Most values queued without being dirty (second touches, copies from tiers below)."""


@dataclass(slots=True)
class Parcel:
    """One value to be carried down."""

    nbytes: int
    tenant: str
    cost: float
    tags: tuple[str, ...] | None = None
    """Labels; None where only the header knows them."""
    dirty: bool = False
    """Kept from eviction until it is written."""
    over: bool = False
    """The cap of dirty memory was reached: only on-evict tiers still take it, best effort."""
    ttl: float | None = None
    """Seconds after which it may be forgotten, where its request said so."""
    attempts: int = 0

    def lifetime(self, tier: Tier, /) -> float | None:
        """Seconds it may be forgotten after in a tier: the shorter of the tier's and its own."""
        return min((s for s in (tier.config.ttl, self.ttl) if s is not None), default=None)


class Writer:
    """Queue and worker of one tier."""

    def __init__(self, tier: Tier, pool: Pool, books: Books) -> None:
        self.tier = tier
        self.queue: OrderedDict[Key, Parcel] = OrderedDict()
        self.lazy = tier.config.write is WritePolicy.ON_EVICT
        self.eager = False
        """Write whatever is queued, lazy or not (a flush)."""
        self.wake = asyncio.Event()
        self.idle: list[asyncio.Future[None]] = []
        self.current: dict[Key, Parcel] = {}
        self._pool = pool
        self._books = books

    def start(self) -> None:
        self.tier.tasks.start("writer", self._run())

    def add(self, key: Key, parcel: Parcel, /) -> bool:
        """Queue a value; False when it is queued already."""
        if key in self.queue or self.tier.storing.get(key) is False:
            return False
        self.queue[key] = parcel
        self.wake.set()
        return True

    def drop(self, keys: Sequence[Key], /) -> None:
        """These values are deleted: forget what is queued."""
        for key in keys:
            parcel = self.queue.pop(key, None)
            if parcel is not None and parcel.dirty:
                self._books.settle([key])

    async def drained(self, seconds: float | None, /) -> bool:
        """Wait until nothing is queued or being written, making lazy tiers hurry."""
        if not self.queue and not self.current:
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.idle.append(future)
        self.eager = True
        self.wake.set()
        if await settle(future, seconds):
            return True
        if future in self.idle:
            self.idle.remove(future)
        return False

    def _due(self) -> bool:
        if not self.queue or self._books.frozen or self.tier.closing:
            return False
        return not self.lazy or self.eager or self._books.pressed()

    async def _run(self) -> None:
        await self.tier.complete.wait()
        while True:
            while self._due():
                trouble = await self._write(self._take())
                if trouble:
                    pause = min(0.1 * 2**trouble, 5.0) * self.tier.context.random.uniform(0.5, 1.0)
                    await self.tier.context.clock.sleep(pause)
            if not self.queue:
                self.eager = False
                for future in self.idle:
                    if not future.done():
                        future.set_result(None)
                self.idle.clear()
            await self.wake.wait()
            self.wake.clear()

    def _take(self) -> dict[Key, Parcel]:
        taken: dict[Key, Parcel] = {}
        nbytes = 0
        while self.queue and len(taken) < BATCH and nbytes < BATCH_NBYTES:
            key, parcel = self.queue.popitem(last=False)
            taken[key] = parcel
            nbytes += parcel.nbytes
        return taken

    async def _write(self, parcels: dict[Key, Parcel], /) -> int:
        """Carry one batch down; returns the attempts of what has to be tried again, 0 when all is settled."""
        keys, again = list(parcels), list[Key]()
        self.current = parcels
        try:
            again = await store(self.tier, self._pool, parcels, self)
        finally:
            self.current = {}
            for key in again:
                parcels[key].attempts += 1
            kept = [
                key for key in again if parcels[key].attempts < ATTEMPTS and not self.tier.closing
            ]
            for key in reversed(kept):
                self.queue[key] = parcels[key]
                self.queue.move_to_end(key, last=False)
            self._books.skip(self.tier, "failed", len(again) - len(kept))
            self._books.settle([key for key in keys if key not in kept and parcels[key].dirty])
        return max((parcels[key].attempts for key in kept), default=0)


class Books:
    """What all writers share: the tiers each dirty value still waits for, and the cap.

    Runs on the loop; ``pending`` is read by committing threads, which may be a moment behind.
    """

    def __init__(self, pool: Pool, cap: int, /) -> None:
        self.pending: dict[Key, int] = {}
        self.nbytes = 0
        self.cap = cap
        self.frozen = False
        self._pool = pool
        self._sizes: dict[Key, int] = {}

    def open(self, key: Key, nbytes: int, tiers: int, /) -> None:
        """A value is dirty until so many tiers have settled it."""
        if key not in self.pending:
            self.nbytes += nbytes
            self._sizes[key] = nbytes
        self.pending[key] = self.pending.get(key, 0) + tiers

    def settle(self, keys: Sequence[Key], /) -> None:
        """One tier is done with these values, one way or the other."""
        clean = []
        for key in keys:
            left = self.pending.get(key, 0) - 1
            if left > 0:
                self.pending[key] = left
            elif left == 0:
                del self.pending[key]
                self.nbytes -= self._sizes.pop(key)
                clean.append(key)
        if clean:
            self._pool.mark_clean(clean)

    def pressed(self) -> bool:
        """Whether lazy tiers must write now: too few clean values, or too many dirty ones."""
        return self.nbytes >= self.cap * 0.8 or self._pool.short_of_clean

    def check(self) -> None:
        """Assert that the bytes are those of the values."""
        assert self._sizes.keys() == self.pending.keys(), "a dirty value without a length"
        assert self.nbytes == sum(self._sizes.values()), "dirty bytes miscounted"

    def skip(self, tier: Tier, reason: str, count: int, /) -> None:
        tier.count("write_back_skipped_total", count, reason=reason)


class Writing:
    """The writers of all tiers, fed from any thread.

    ``committed``, ``touched`` and ``hurry`` are plain calls that leave a note and wake the loop; everything
    else belongs to the loop.
    """

    def __init__(self, pool: Pool, tiers: Sequence[Tier], cap: int, /) -> None:
        self.books = Books(pool, cap)
        self.writers: dict[Tier, Writer] = {}
        self.first = False
        """Some tier wants values at first sight."""
        self.tokens = 256
        self._tiers = tiers
        self._pool = pool
        self._inbox: deque[tuple[Key, Parcel]] = deque()
        self._inbox_nbytes = 0
        self._touched: deque[Sequence[Key]] = deque(maxlen=TOUCHES)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False

    def attach(self, tier: Tier, /) -> None:
        """Start the writer of an opened tier."""
        self._loop = asyncio.get_running_loop()
        writer = self.writers[tier] = Writer(tier, self._pool, self.books)
        writer.start()
        self._learn()

    def detach(self, tier: Tier, /) -> None:
        """Forget the writer of a tier whose tasks have been stopped."""
        writer = self.writers.pop(tier, None)
        if writer is not None:
            writer.drop(list(writer.queue))
        self._learn()

    def _learn(self) -> None:
        self.first = any(tier.config.after_touches < 2 for tier in self.writers)

    # -- any thread ------------------------------------------------------------------------------------------

    def fitting(self, sizes: Sequence[int], /) -> int:
        """How many of these values, from the first on, may become dirty."""
        room = self.books.cap - self.books.nbytes - self._inbox_nbytes
        for count, nbytes in enumerate(sizes):
            room -= nbytes
            if room < 0:
                return count
        return len(sizes)

    def committed(self, parcels: Sequence[tuple[Key, Parcel]], /) -> None:
        """Values became visible, dirty as their parcels say."""
        if not parcels:
            return
        self._inbox.extend(parcels)
        self._inbox_nbytes += sum(parcel.nbytes for _, parcel in parcels)
        self._wake()

    def touched(self, keys: Sequence[Key], /) -> None:
        """Resident values were used: a second touch for some tiers, news for the policies of others."""
        if self.writers:
            self._touched.append(keys)
            if not self.first or len(self._touched) > TOUCHES // 2:
                self._wake()

    def hurry(self) -> None:
        """A reservation was refused for want of clean memory."""
        self._wake()

    def _wake(self) -> None:
        if not self._scheduled and self._loop is not None and not self._loop.is_closed():
            self._scheduled = True
            self._loop.call_soon_threadsafe(self.drain)

    # -- the loop --------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take in what other threads left."""
        self._scheduled = False
        while self._inbox:
            key, parcel = self._inbox.popleft()
            self._inbox_nbytes -= parcel.nbytes
            takers = sum(
                self._offer(writer, key, parcel) for writer in self.writers.values()
                if writer.tier.config.after_touches < 2
            )  # fmt: skip
            if parcel.dirty and takers:
                self.books.open(key, parcel.nbytes, takers)
            elif parcel.dirty:
                self._pool.mark_clean([key])
        while self._touched:
            keys = self._touched.popleft()
            for writer in self.writers.values():
                self._touch(writer, keys)
        for writer in self.writers.values():
            if writer.lazy and writer.queue:
                writer.wake.set()

    def rose(self, source: Tier, key: Key, header: frame.Header) -> None:
        """A value came up from ``source``: the tiers passed on its way may want it (never ``source`` itself)."""
        nbytes = header.nbytes + header.stored_nbytes
        for tier in self._tiers:
            if tier is source:
                return
            writer = self.writers.get(tier)
            if (
                writer is not None
                and tier.config.after_touches < 2
                and len(writer.queue) < UNTOUCHED
            ):
                self._offer(writer, key, Parcel(nbytes, "", 1.0, header.tags))

    def _offer(self, writer: Writer, key: Key, parcel: Parcel) -> bool:
        tier = writer.tier
        if not tier.gate.keeps(parcel.nbytes, self.tokens):
            tier.count("gate_skips_total", verb="store")
            return False
        if parcel.over and not writer.lazy:
            self.books.skip(tier, "dirty cap", 1)
            return False
        return writer.add(key, replace(parcel))

    def _touch(self, writer: Writer, keys: Sequence[Key]) -> None:
        holdings = writer.tier.holdings
        if holdings is None:
            missing = keys
        else:
            slots = holdings.find(keys, writer.tier.context.clock.now())
            holdings.touch(slots)
            missing = [key for key, slot in zip(keys, slots, strict=True) if slot < 0]
        if writer.tier.config.after_touches < 2 or len(writer.queue) + len(missing) > UNTOUCHED:
            return
        for key, nbytes in zip(missing, self._pool.lengths(missing), strict=True):
            if nbytes is not None:
                self._offer(writer, key, Parcel(nbytes, "", 1.0))

    def forget(self, keys: Sequence[Key], /) -> None:
        """These values are deleted."""
        self.drain()
        for writer in self.writers.values():
            writer.drop(keys)

    def tagged(self, tag: str, /) -> set[Key]:
        """Values under a tag that are queued or being written."""
        self.drain()
        return {
            key
            for writer in self.writers.values()
            for key, parcel in (*writer.queue.items(), *writer.current.items())
            if parcel.tags and tag in parcel.tags
        }

    async def flush(self, seconds: Callable[[], float | None], /, *, through: bool = False) -> None:
        """Wait until the writers (those of write-through tiers) have nothing left, or the time is over."""
        self.drain()
        for writer in list(self.writers.values()):
            if not through or writer.tier.config.write is WritePolicy.THROUGH:
                await writer.drained(seconds())

    def unfreeze(self) -> None:
        self.books.frozen = False
        for writer in self.writers.values():
            writer.wake.set()
