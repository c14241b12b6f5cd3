"""Real bytes through one tier: stored, looked up, loaded, compared, deleted, with the rates measured."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import random
import threading
import time
from typing import TYPE_CHECKING

from lmcache_core.cli.doctor import Finding
from lmcache_core.clock import SystemClock
from lmcache_core.files import OsFiles
from lmcache_core.spi import (
    AbstractBackend,
    Context,
    Key,
    LMCacheError,
    Load,
    LoadStatus,
    MemoryOptions,
    ResidentPool,
    Store,
    StoreStatus,
    Unavailable,
    Unsupported,
)  # fmt: skip
from lmcache_core.threads import DaemonExecutor

if TYPE_CHECKING:
    from lmcache_core.config import TierConfig
    from lmcache_core.registry import Registry

COUNT, NBYTES = 16, 1 << 20


def round_trip(tier: TierConfig, registry: Registry, /, *, timeout: float) -> list[Finding]:
    """Open a tier's backend as configured and send values through it; never takes longer than ``timeout``."""
    about = f"tier {tier.name}"
    outcome: list[Finding] = []

    def run() -> None:
        try:
            backend = registry.load("backends", tier.plugin)(tier.options, _context(tier.name))
            outcome.append(asyncio.run(_measure(about, backend, tier)))
        except (Unavailable, OSError) as error:
            outcome.append(
                Finding(
                    about,
                    "unreachable",
                    _line(error),
                    "start the store, or correct where it is expected",
                )
            )
        except LMCacheError as error:
            outcome.append(
                Finding(about, "fault", _line(error), "correct the configuration of the tier")
            )
        except Exception as error:  # noqa: BLE001  named boundary: plugin code, and the other tiers matter too
            outcome.append(
                Finding(
                    about,
                    "fault",
                    f"{type(error).__name__}: {_line(error)}",
                    f"report it to {tier.plugin}",
                )
            )

    # A hung backend cannot be interrupted; the thread is daemonic, so that the command ends all the same.
    thread = threading.Thread(target=run, name=f"doctor-{tier.name}", daemon=True)
    thread.start()
    thread.join(timeout)
    if outcome:
        return outcome
    return [
        Finding(
            about,
            "unreachable",
            f"no answer within {timeout:g} s",
            "check the store and the network",
        )
    ]


async def _measure(about: str, backend: AbstractBackend, tier: TierConfig) -> Finding:
    await backend.open()
    try:
        room = min(NBYTES, backend.capabilities.max_value or NBYTES)
        if tier.size is not None:
            room = min(room, tier.size // (2 * COUNT))
        if room < 1:
            return Finding(
                about, "warning", f"its size of {tier.size} holds nothing", "raise its size"
            )
        return await _exchange(about, backend, room)
    finally:
        await backend.aclose()


async def _exchange(about: str, backend: AbstractBackend, nbytes: int) -> Finding:
    space = os.urandom(32)
    keys = [Key(space, os.urandom(32)) for _ in range(COUNT)]
    # Page-aligned, as the manager's memory is.
    there, back = (memoryview(mmap.mmap(-1, COUNT * nbytes)) for _ in range(2))
    there[:] = random.Random().randbytes(COUNT * nbytes)
    back[:] = bytes(COUNT * nbytes)  # the first touch of a page is not the tier's time
    at = [slice(i * nbytes, (i + 1) * nbytes) for i in range(COUNT)]
    step = backend.capabilities.max_batch or COUNT
    batches = [range(i, min(i + step, COUNT)) for i in range(0, COUNT, step)]
    try:
        begin = time.perf_counter()
        for batch in batches:
            for stored in await backend.store([Store(keys[i], (there[at[i]],)) for i in batch]):
                if stored.status is StoreStatus.REFUSED:
                    return Finding(
                        about, "warning", f"refused a store: {stored.reason}", "make room in it"
                    )
                if stored.error is not None:
                    raise stored.error
        store_s = time.perf_counter() - begin
        begin = time.perf_counter()
        for batch in batches:
            if None in await backend.lookup([keys[i] for i in batch]):
                return Finding(
                    about, "fault", "a stored value is not found", "do not use this tier"
                )
        lookup_s = (time.perf_counter() - begin) / len(batches)
        begin = time.perf_counter()
        for batch in batches:
            for loaded in await backend.load([Load(keys[i], (back[at[i]],)) for i in batch]):
                if loaded.error is not None:
                    raise loaded.error
                if loaded.status is LoadStatus.MISSED:
                    return Finding(
                        about, "fault", "a stored value is not loaded", "do not use this tier"
                    )
        load_s = time.perf_counter() - begin
    finally:
        await backend.delete(keys)
    if there != back:
        return Finding(
            about, "fault", "other bytes came back than were stored", "do not use this tier"
        )
    size = COUNT * nbytes / 1e6
    return Finding(
        about, "good",
        f"stored at {size / store_s:.0f} MB/s, loaded at {size / load_s:.0f} MB/s,"
        f" looked up in {lookup_s * 1000:.2f} ms ({COUNT} values of {nbytes >> 10} KiB)",
    )  # fmt: skip


def _context(name: str) -> Context:
    return Context(
        tier=name,
        clock=SystemClock(),
        random=random.Random(),
        log=logging.getLogger(f"lmcache.tier.{name}"),
        executor=DaemonExecutor(f"doctor-{name}"),
        files=OsFiles(),
        emit=lambda event: None,
        create_pool=_no_pool,
    )


def _no_pool(options: MemoryOptions) -> ResidentPool:
    raise Unsupported("lmcache doctor makes no resident memory")


def _line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0] or type(error).__name__
