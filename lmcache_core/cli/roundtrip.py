"""Real values through one tier, wrappers and serdes included: stored, looked up, loaded, compared, deleted."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import threading
import time
from dataclasses import replace
from typing import NamedTuple

from lmcache_core import frame
from lmcache_core.cli.finding import Finding, State
from lmcache_core.config import Effective, TierConfig
from lmcache_core.observers import Metrics
from lmcache_core.registry import said
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
    ResidentPool,
    SegmentSpec,
    Store,
    StoreStatus,
    Unavailable,
)
from lmcache_core.storage.build import Builder, default_context

COUNT, NBYTES = 16, 1 << 20
POOL = ByteSize(COUNT * NBYTES * 4)
USELESS = "do not use this tier"


class _Verdict(Exception):
    """Ends a round trip early."""

    def __init__(self, state: State, found: str, remedy: str) -> None:
        super().__init__(state, found, remedy)
        self.finding: tuple[State, str, str] = (state, found, remedy)


class _Times(NamedTuple):
    """Seconds of the calls that store, look up and load all values."""

    store: float
    lookup: float
    load: float


def round_trip(tier: TierConfig, effective: Effective, /, *, timeout: float) -> Finding:
    """Open a tier as configured and send values through it; never takes longer than ``timeout``."""
    outcome: list[tuple[State, str, str]] = []

    def run() -> None:
        try:
            outcome.append(("good", asyncio.run(_trip(tier, effective)), ""))
        except Exception as error:  # noqa: BLE001  named boundary: plugin code, and the other tiers matter too
            outcome.append(_judged(error, tier))

    # A hung backend cannot be interrupted; the thread is daemonic, so that the command ends all the same.
    thread = threading.Thread(target=run, name=f"doctor-{tier.name}", daemon=True)
    thread.start()
    thread.join(timeout)
    hung: tuple[State, str, str] = (
        "unreachable", f"no answer within {timeout:g} s", "check the store and the network",
    )  # fmt: skip
    return Finding(f"tier {tier.name}", *(outcome or [hung])[0])


def _judged(error: Exception, tier: TierConfig) -> tuple[State, str, str]:
    line = str(error).split("\n", 1)[0] or type(error).__name__
    match error:
        case _Verdict():
            return error.finding
        case Unavailable() | OSError():
            return "unreachable", line, "start the store, or correct where it is expected"
        case Corrupt():
            return "fault", line, USELESS
        case LMCacheError():
            return "fault", line, "correct the configuration of the tier"
    return "fault", said(error), f"report it to {tier.plugin}"


async def _trip(tier: TierConfig, effective: Effective) -> str:
    """What a good tier is found to do."""
    plain = default_context(tier.name)
    builder = Builder(effective.config, effective.registry, Metrics(), lambda name: plain)

    def create_pool(options: MemoryOptions, /) -> ResidentPool:
        size = ByteSize(min(tier.size or POOL, POOL))
        return builder.pool(plain, replace(tier, size=size), options)

    context = replace(plain, create_pool=create_pool)
    backend = builder.backend(tier, context)
    if not builder.is_resident(tier):
        backend = builder.wrap(tier, backend, context)
    await backend.open()
    try:
        most = min(NBYTES, backend.capabilities.max_value or NBYTES)
        most = min(most, (tier.size or POOL) // (2 * COUNT))
        if most <= frame.ALIGNMENT:
            raise _Verdict("warning", f"too small for values of {most} bytes", "raise its limits")
        values = _Values(most // frame.ALIGNMENT * frame.ALIGNMENT)
        times = await values.through(backend)
    finally:
        await backend.aclose()
    if values.there != values.back:
        raise _Verdict("fault", "other bytes came back than were stored", USELESS)
    size = COUNT * values.nbytes / 1e6
    return (
        f"stored at {size / times.store:.0f} MB/s, loaded at {size / times.load:.0f} MB/s,"
        f" looked up in {times.lookup * 1000:.2f} ms ({COUNT} values of {values.nbytes >> 10} KiB)"
    )


class _Values:
    """Random frames, page-aligned like the manager's: what goes is ``there``, what comes is ``back``."""

    def __init__(self, nbytes: int) -> None:
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

    async def through(self, backend: AbstractBackend) -> _Times:
        step = backend.capabilities.max_batch or COUNT
        batches = [range(i, min(i + step, COUNT)) for i in range(0, COUNT, step)]
        begin = time.perf_counter()
        try:
            for batch in batches:
                stores = [Store(self.keys[i], (self.there[i],)) for i in batch]
                for stored in await backend.store(stores):
                    if stored.status is StoreStatus.REFUSED:
                        found = f"refused a store: {stored.reason}"
                        raise _Verdict("warning", found, "make room in it")
                    if stored.error is not None:
                        raise stored.error
            stored_at = time.perf_counter()
            for batch in batches:
                if None in await backend.lookup([self.keys[i] for i in batch]):
                    raise _Verdict("fault", "a stored value is not found", USELESS)
            found_at = time.perf_counter()
            for batch in batches:
                loads = [Load(self.keys[i], (self.back[i],)) for i in batch]
                for loaded in await backend.load(loads):
                    if loaded.error is not None:
                        raise loaded.error
                    if loaded.status is LoadStatus.MISSED:
                        raise _Verdict("fault", "a stored value is not loaded", USELESS)
            loaded_at = time.perf_counter()
        finally:
            await backend.delete(self.keys)
        lookup_s = (found_at - stored_at) / len(batches)
        return _Times(stored_at - begin, lookup_s, loaded_at - found_at)
