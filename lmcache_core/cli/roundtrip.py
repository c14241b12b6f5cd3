"""Real values through one tier, wrappers and serdes included: stored, looked up, loaded, compared, deleted."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from lmcache_core import frame
from lmcache_core.cli.doctor import Finding
from lmcache_core.observers import Metrics
from lmcache_core.spi import (
    AbstractBackend,
    ByteSize,
    Corrupt,
    Interior,
    Key,
    KVSpec,
    LMCacheError,
    Load,
    LoadStatus,
    MemoryOptions,
    Refusal,
    ResidentPool,
    SegmentSpec,
    Store,
    StoreStatus,
    Unavailable,
)
from lmcache_core.storage.build import Builder, default_context

if TYPE_CHECKING:
    from lmcache_core.config import Effective, TierConfig

COUNT, NBYTES = 16, 1 << 20
POOL = ByteSize(COUNT * NBYTES * 4)
USELESS = "do not use this tier"


def round_trip(tier: TierConfig, effective: Effective, /, *, timeout: float) -> Finding:
    """Open a tier as configured and send values through it; never takes longer than ``timeout``."""
    outcome: list[Finding] = []

    def finding(state: str, found: str, remedy: str = "") -> Finding:
        return Finding(f"tier {tier.name}", state, found, remedy)  # type: ignore[arg-type]  # always one of them

    def run() -> None:
        try:
            outcome.append(asyncio.run(_Trip(tier, effective, finding).measure()))
        except (Unavailable, OSError) as error:
            remedy = "start the store, or correct where it is expected"
            outcome.append(finding("unreachable", _line(error), remedy))
        except Corrupt as error:
            outcome.append(finding("fault", _line(error), USELESS))
        except LMCacheError as error:
            outcome.append(finding("fault", _line(error), "correct the configuration of the tier"))
        except Exception as error:  # noqa: BLE001  named boundary: plugin code, and the other tiers matter too
            what = f"{type(error).__name__}: {_line(error)}"
            outcome.append(finding("fault", what, f"report it to {tier.plugin}"))

    # A hung backend cannot be interrupted; the thread is daemonic, so that the command ends all the same.
    thread = threading.Thread(target=run, name=f"doctor-{tier.name}", daemon=True)
    thread.start()
    thread.join(timeout)
    if outcome:
        return outcome[0]
    return finding(
        "unreachable", f"no answer within {timeout:g} s", "check the store and the network"
    )


class _Trip:
    """One journey. What goes is ``there``, what comes back is ``back``: frames, page-aligned like the manager's."""

    def __init__(
        self, tier: TierConfig, effective: Effective, finding: Callable[..., Finding]
    ) -> None:
        self.tier = tier
        self.finding = finding
        self.context = default_context(tier.name)
        self.builder = Builder(
            effective.config, effective.registry, Metrics(), lambda name: self.context
        )

    async def measure(self) -> Finding:
        pools: list[ResidentPool] = []

        def create_pool(options: MemoryOptions, /) -> ResidentPool:
            size = ByteSize(min(self.tier.size or POOL, POOL))
            pools.append(self.builder.pool(self.context, replace(self.tier, size=size), options))
            return pools[-1]

        context = replace(self.context, create_pool=create_pool)
        backend = self.builder.backend(self.tier, context)
        if not self.builder.is_resident(self.tier):
            backend = self.builder.wrap(self.tier, backend, context)
        await backend.open()
        try:
            most = min(NBYTES, backend.capabilities.max_value or NBYTES)
            most = min(most, (self.tier.size or POOL) // (2 * COUNT))
            if most <= frame.ALIGNMENT:
                return self.finding(
                    "warning", f"too small for values of {most} bytes", "raise its limits"
                )
            self.values(most // frame.ALIGNMENT * frame.ALIGNMENT)
            return self.resident(pools[0]) if pools else await self.exchange(backend)
        finally:
            await backend.aclose()

    def values(self, nbytes: int) -> None:
        """Make random frames of ``nbytes`` each."""
        self.nbytes = nbytes
        there, back = (memoryview(mmap.mmap(-1, COUNT * nbytes)) for _ in range(2))
        there[:] = random.Random().randbytes(COUNT * nbytes)
        back[:] = bytes(COUNT * nbytes)  # the first touch of a page is not the tier's time
        space, room = os.urandom(32), frame.header_nbytes(1)
        self.keys = [Key(space, os.urandom(32)) for _ in range(COUNT)]
        self.there = [there[i * nbytes : (i + 1) * nbytes] for i in range(COUNT)]
        self.back = [back[i * nbytes : (i + 1) * nbytes] for i in range(COUNT)]
        segment = SegmentSpec(0, 0, 0, nbytes - room)
        spec = KVSpec("uint8", 1, 1, 0, 0, Interior.PAGE, (segment,))
        self.identities = [
            frame.seal_value(view[:room], view[room:], key, spec=spec).identity
            for key, view in zip(self.keys, self.there, strict=True)
        ]

    async def exchange(self, backend: AbstractBackend) -> Finding:
        step = backend.capabilities.max_batch or COUNT
        batches = [range(i, min(i + step, COUNT)) for i in range(0, COUNT, step)]
        begin = time.perf_counter()
        try:
            for batch in batches:
                stores = [Store(self.keys[i], (self.there[i],)) for i in batch]
                for stored in await backend.store(stores):
                    if stored.status is StoreStatus.REFUSED:
                        return self.finding(
                            "warning", f"refused a store: {stored.reason}", "make room in it"
                        )
                    if stored.error is not None:
                        raise stored.error
            stored_at = time.perf_counter()
            for batch in batches:
                if None in await backend.lookup([self.keys[i] for i in batch]):
                    return self.finding("fault", "a stored value is not found", USELESS)
            found_at = time.perf_counter()
            for batch in batches:
                loads = [Load(self.keys[i], (self.back[i],)) for i in batch]
                for loaded in await backend.load(loads):
                    if loaded.error is not None:
                        raise loaded.error
                    if loaded.status is LoadStatus.MISSED:
                        return self.finding("fault", "a stored value is not loaded", USELESS)
            loaded_at = time.perf_counter()
        finally:
            await backend.delete(self.keys)
        lookup_s = (found_at - stored_at) / len(batches)
        return self.compared(stored_at - begin, lookup_s, loaded_at - found_at)

    def resident(self, pool: ResidentPool) -> Finding:
        begin = time.perf_counter()
        grants = pool.reserve([(key, self.nbytes) for key in self.keys], self)
        for grant, view, identity in zip(grants, self.there, self.identities, strict=True):
            if isinstance(grant, Refusal):
                return self.finding("warning", f"refused a store: {grant.value}", "raise its size")
            grant.view[:] = view
            pool.commit(grant, identity)
        stored_at = time.perf_counter()
        leases = pool.lease(self.keys, self)
        found_at = time.perf_counter()
        held = [lease for lease in leases if lease is not None]
        for lease, view in zip(held, self.back, strict=False):
            view[:] = lease.view
        loaded_at = time.perf_counter()
        pool.release(held)
        return self.compared(stored_at - begin, found_at - stored_at, loaded_at - found_at)

    def compared(self, store_s: float, lookup_s: float, load_s: float) -> Finding:
        if self.there != self.back:
            return self.finding("fault", "other bytes came back than were stored", USELESS)
        size = COUNT * self.nbytes / 1e6
        return self.finding(
            "good",
            f"stored at {size / store_s:.0f} MB/s, loaded at {size / load_s:.0f} MB/s,"
            f" looked up in {lookup_s * 1000:.2f} ms ({COUNT} values of {self.nbytes >> 10} KiB)",
        )


def _line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0] or type(error).__name__
