"""Real values through one tier, wrappers and serdes included: stored, looked up, loaded, compared, deleted."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

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

T = TypeVar("T")
COUNT, NBYTES = 16, 1 << 20
POOL = ByteSize(COUNT * NBYTES * 4)
USELESS = "do not use this tier"


class _Verdict(Exception):
    """Ends a round trip early."""

    def __init__(self, state: State, found: str, remedy: str) -> None:
        super().__init__(state, found, remedy)
        self.finding: tuple[State, str, str] = (state, found, remedy)


class Times(NamedTuple):
    """Seconds of the calls that store, look up and load all values, and of processor time on the way."""

    store: float
    lookup: float
    load: float
    store_cpu: float
    load_cpu: float


def within(timeout: float, name: str, work: Callable[[], Coroutine[Any, Any, T]], /) -> T:
    """Run a coroutine that calls plugin code, which may hang.

    Raises:
        Unavailable: no end within ``timeout``. Whatever the coroutine raises.
    """
    outcome: list[T | Exception] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(work()))
        except Exception as error:  # noqa: BLE001  handed to the caller
            outcome.append(error)

    # A hung backend cannot be interrupted; the thread is daemonic, so that the command ends all the same.
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(timeout)
    if not outcome:
        raise Unavailable(f"no answer within {timeout:g} s")
    (found,) = outcome
    if isinstance(found, Exception):
        raise found
    return found


def round_trip(tier: TierConfig, effective: Effective, /, *, timeout: float) -> Finding:
    """Open a tier as configured and send values through it; never takes longer than ``timeout``."""
    try:
        found = within(timeout, f"doctor-{tier.name}", lambda: _trip(tier, effective))
        return Finding(f"tier {tier.name}", "good", found)
    except Exception as error:  # noqa: BLE001  named boundary: plugin code, and the other tiers matter too
        return Finding(f"tier {tier.name}", *judged(error, tier))


def judged(error: Exception, tier: TierConfig, /) -> tuple[State, str, str]:
    """State, what was found, and a remedy."""
    while isinstance(error, ExceptionGroup):  # of a wrapper that does several things at once
        error = error.exceptions[0]
    line = str(error).split("\n", 1)[0] or type(error).__name__
    match error:
        case _Verdict():
            return error.finding
        case Unavailable() | OSError() if line.startswith("no answer"):
            return "unreachable", line, "check the store and the network"
        case Unavailable() | OSError():
            return "unreachable", line, "start the store, or correct where it is expected"
        case Corrupt():
            return "fault", line, USELESS
        case LMCacheError():
            return "fault", line, "correct the configuration of the tier"
    return "fault", said(error), f"report it to {tier.plugin}"


@asynccontextmanager
async def opened(
    tier: TierConfig, effective: Effective, /, *, room: int, wrapped: bool = True
) -> AsyncIterator[AbstractBackend]:
    """The backend of a tier, in its wrappers unless told otherwise, open; a resident one has at most ``room`` bytes."""
    plain = default_context(tier.name)
    builder = Builder(effective.config, effective.registry, Metrics(), lambda name: plain)

    def create_pool(options: MemoryOptions, /) -> ResidentPool:
        size = ByteSize(min(tier.size or room, room))
        return builder.pool(plain, replace(tier, size=size), options)

    context = replace(plain, create_pool=create_pool)
    backend = builder.backend(tier, context)
    if wrapped and not builder.is_resident(tier):
        backend = builder.wrap(tier, backend, context)
    await backend.open()
    try:
        yield backend
    finally:
        await backend.aclose()


async def measure(
    backend: AbstractBackend, tier: TierConfig, /, *, count: int, nbytes: int
) -> tuple[int, Times]:
    """Send ``count`` values of ``nbytes``, or as long as the tier takes them; that length, and the times.

    Raises:
        Exception: what ``judged`` has a word for.
    """
    most = min(nbytes, backend.capabilities.max_value or nbytes)
    most = min(most, (tier.size or POOL * 64) // (2 * count))
    if most <= frame.ALIGNMENT:
        raise _Verdict("warning", f"too small for values of {most} bytes", "raise its limits")
    values = _Values(count, most // frame.ALIGNMENT * frame.ALIGNMENT)
    times = await values.through(backend)
    if values.there != values.back:
        raise _Verdict("fault", "other bytes came back than were stored", USELESS)
    return values.nbytes, times


async def _trip(tier: TierConfig, effective: Effective) -> str:
    """What a good tier is found to do."""
    async with opened(tier, effective, room=POOL) as backend:
        nbytes, times = await measure(backend, tier, count=COUNT, nbytes=NBYTES)
    size = COUNT * nbytes / 1e6
    return (
        f"stored at {size / times.store:.0f} MB/s, loaded at {size / times.load:.0f} MB/s,"
        f" looked up in {times.lookup * 1000:.2f} ms ({COUNT} values of {nbytes >> 10} KiB)"
    )


class _Values:
    """Random frames, page-aligned like the manager's: what goes is ``there``, what comes is ``back``."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        there, back = (memoryview(mmap.mmap(-1, count * nbytes)) for _ in range(2))
        there[:] = random.Random().randbytes(count * nbytes)
        back[:] = bytes(count * nbytes)  # the first touch of a page is not the tier's time
        space, room = os.urandom(32), frame.header_nbytes(1)
        self.keys = [Key(space, os.urandom(32)) for _ in range(count)]
        self.there = [there[i * nbytes : (i + 1) * nbytes] for i in range(count)]
        self.back = [back[i * nbytes : (i + 1) * nbytes] for i in range(count)]
        segment = SegmentSpec(0, 0, 0, nbytes - room)
        spec = KVSpec("uint8", 1, 1, 0, 0, Interior.PAGE, (segment,))
        self.identities = [
            frame.seal_value(view[:room], view[room:], key, spec=spec).identity
            for key, view in zip(self.keys, self.there, strict=True)
        ]

    async def through(self, backend: AbstractBackend) -> Times:
        count, now, cpu = len(self.keys), time.perf_counter, time.process_time
        step = backend.capabilities.max_batch or count
        batches = [range(i, min(i + step, count)) for i in range(0, count, step)]
        begin, cpu_at = now(), [cpu()]
        try:
            for batch in batches:
                stores = [Store(self.keys[i], (self.there[i],)) for i in batch]
                for stored in await backend.store(stores):
                    if stored.status is StoreStatus.REFUSED:
                        found = f"refused a store: {stored.reason}"
                        raise _Verdict("warning", found, "make room in it")
                    if stored.error is not None:
                        raise stored.error
            stored_at = now()
            cpu_at.append(cpu())
            for batch in batches:
                if None in await backend.lookup([self.keys[i] for i in batch]):
                    raise _Verdict("fault", "a stored value is not found", USELESS)
            found_at = now()
            cpu_at.append(cpu())
            for batch in batches:
                loads = [Load(self.keys[i], (self.back[i],)) for i in batch]
                for loaded in await backend.load(loads):
                    if loaded.error is not None:
                        raise loaded.error
                    if loaded.status is LoadStatus.MISSED:
                        raise _Verdict("fault", "a stored value is not loaded", USELESS)
            loaded_at = now()
            cpu_at.append(cpu())
        finally:
            await backend.delete(self.keys)
        lookup_s = (found_at - stored_at) / len(batches)
        return Times(
            stored_at - begin, lookup_s, loaded_at - found_at, cpu_at[1] - cpu_at[0],
            cpu_at[3] - cpu_at[2],
        )  # fmt: skip
