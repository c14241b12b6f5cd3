"""Contexts for tests: a plugin's world, real or simulated."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from typing import Any

from lmcache_core.clock import SystemClock
from lmcache_core.files import OsFiles
from lmcache_core.spi import Context, Event, MemoryOptions, ResidentPool
from lmcache_core.testing.simulation import SimClock, SimExecutor
from lmcache_core.threads import DaemonExecutor


def ignore_event(event: Event, /) -> None:
    """What a test context does with events unless told otherwise."""


def test_context(*, tier: str = "test", seed: int = 0, **overrides: Any) -> Context:  # noqa: PT028  # no test
    """Make a context on real clocks, threads and files; any field of ``Context`` may be overridden."""
    context = Context(
        tier=tier,
        clock=SystemClock(),
        random=random.Random(seed),
        log=logging.getLogger(f"lmcache.tier.{tier}"),
        executor=DaemonExecutor(f"lmcache-{tier}"),
        files=OsFiles(),
        emit=ignore_event,
        create_pool=create_pool,
    )
    return replace(context, **overrides)


def simulated_context(*, threads: int = 4, latency_s: float = 0.001, **overrides: Any) -> Context:
    """``test_context`` with virtual time and pretended threads; its verbs work inside ``run_simulated`` only."""
    simulated: dict[str, Any] = {
        "clock": SimClock(),
        "executor": SimExecutor(threads=threads, latency_s=latency_s),
    }
    return test_context(**(simulated | overrides))


def create_pool(options: MemoryOptions, /) -> ResidentPool:
    """A small resident pool with the default policy."""
    from lmcache_core.memory.arena import Arena
    from lmcache_core.memory.pool import Pool
    from lmcache_core.policies.lru import LRU, LRUConfig

    nbytes = 64 << 20
    return Pool(Arena(nbytes, options), LRU(LRUConfig(), nbytes))


test_context.__test__ = False  # type: ignore[attr-defined]  # pytest would collect the name
