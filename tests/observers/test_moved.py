"""Every declared metric moves somewhere: one that nobody counts is a promise on a dashboard and nothing else."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lmcache_core.config import load
from lmcache_core.identity import Unkeyable
from lmcache_core.memory.backend import MemoryBackend
from lmcache_core.observers import EVENT_LIMIT, METRICS, Emitter, Metrics, check_identities
from lmcache_core.registry import Offer, Registry
from lmcache_core.spi import ByteSize, Event, Store, Stored, TierOpened
from lmcache_core.storage.build import build
from lmcache_core.storage.manager import StorageManager
from lmcache_core.testing.histories import run_history
from lmcache_core.testing.simulation import run_simulated
from lmcache_core.testing.worlds import key_of, make_manager, make_tier, put
from tests.engine.rig import world
from tests.wrappers.serdes import NoOptions, Squeeze

HISTORIES = 25
SERVER = {
    "lmcache_memory_pinned_bytes",
    "lmcache_space_bytes",
    "lmcache_space_chunks",
}
"""What only a daemon counts: ``server/tests/http/test_operators.py``."""
ENGINE = {"lmcache_canary_tokens_total", "lmcache_canary_differing_tokens_total"}
"""What an engine that can compute again counts: ``engines/vllm/tests/test_failures.py``."""
KEYS = [key_of(i) for i in range(8)]


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the metrics that got a value other than 0, in whatever registry of this process."""
    found: set[str] = set()

    def recording(kept: Callable[..., None]) -> Callable[..., None]:
        def record(self: Metrics, name: str, value: float = 1, /, **labels: str) -> None:
            if value:
                found.add(name)
            kept(self, name, value, **labels)

        return record

    for verb in ("add", "set", "observe"):
        monkeypatch.setattr(Metrics, verb, recording(getattr(Metrics, verb)))
    return found


class Refusing(MemoryBackend):
    async def store(self, batch: Sequence[Store], /, **how: Any) -> Sequence[Stored]:
        for index in range(len(batch)):
            how["done"](index, Stored.refused("read-only"))
        return [Stored.refused("read-only")] * len(batch)


class Broken(Squeeze):
    """A serde that its self-test catches."""

    config_type = NoOptions
    wire_id = "broken"

    def decode(self, info: Any, source: Any, into: Any) -> None:
        into[:] = bytes(into.nbytes)


OFFERS = [
    Offer("backends", "cpu", "lmcache_backend_cpu:CPUBackend"),
    Offer("backends", "refusing", f"{__name__}:Refusing"),
    Offer("serdes", "squeeze", "tests.wrappers.serdes:Squeeze"),
    Offer("serdes", "broken", f"{__name__}:Broken"),
]


def with_tiers(scene: Callable[[StorageManager], Any], *tiers: dict[str, Any]) -> None:
    """Play a scene on a manager that was made from a configuration."""
    registry = Registry(find=lambda: OFFERS, environment={})
    cpu = {"cpu": {"size": "16MiB", "populate": False}}
    effective = load(env={}, registry=registry, flags={"tiers": [cpu, *tiers]})

    async def play() -> None:
        manager = await build(effective.config, registry)
        try:
            await scene(manager)
            manager.check()
        finally:
            await manager.aclose()

    asyncio.run(play())


async def store_and_lease(manager: StorageManager) -> None:
    await manager.store([(key, memoryview(bytes(9000))) for key in KEYS])
    leases = manager.lease(KEYS[:2], "reader")
    manager.measure()
    manager.release(leases)
    await manager.flush(deadline=manager.context.clock.now() + 5)
    await manager.clear(tier="cpu")
    manager.release((await manager.load(KEYS, "reader")).leases)


def requests() -> None:
    """An engine asks, loads, stores, asks what has no key, and loses a value between offer and load."""
    with world() as made:
        engine = made.engine()
        prompt = list(range(100, 118))
        made.fill(engine, prompt)
        assert made.reuse(engine, prompt) == 16
        with pytest.raises(Unkeyable):
            made.fill(engine, [1, -1, 2, 3])
        request = engine.request("late", prompt)
        request.lookup()
        made.damage(made.resident()[0], random.Random(0))
        request.load(made.memory(18))
        request.end()


def gated() -> None:
    async def play() -> None:
        manager = make_manager(
            [make_tier(seconds=1.0, size=1 << 20, scrub=ByteSize(1 << 20))], cost_gate=True
        )
        await manager.open()
        put(manager, KEYS)
        await manager.flush()
        for _ in range(20):
            await manager.clear(tier=manager.context.tier)
            manager.report_prefill(1_000_000, 0.001)
            manager.release((await manager.load(KEYS, "reader")).leases)
        await asyncio.sleep(200)
        await manager.aclose()

    run_simulated(play())


def told() -> None:
    class Raising:
        def observe(self, event: Event, /) -> None:
            raise RuntimeError("no")

    log = logging.getLogger("test.moved")
    log.disabled = True
    emitter = Emitter([("raising", Raising())], Metrics(), log=log, threaded=False)
    for _ in range(EVENT_LIMIT + 1):
        emitter(TierOpened(tier="cpu", plugin="cpu"))
    emitter.drain()


def test_every_declared_metric_moves(moved: set[str]) -> None:
    """Seen in LMCache#3108."""
    for seed in range(HISTORIES):
        run_history(seed)
    requests()
    with_tiers(store_and_lease, {"refusing": {"size": "1MiB"}})
    wrappers = {"chaos": {"fail": 1.0}, "breaker": {"open_after": 1}}
    flaky = {"memory": {"size": "1MiB", "wrappers": wrappers}}
    with_tiers(store_and_lease, flaky)
    with_tiers(
        store_and_lease,
        {"memory": {"size": "8MiB", "name": "coded", "serde": ["squeeze"]}},
        {"memory": {"size": "8MiB", "name": "spoilt", "serde": ["broken"]}},
    )
    gated()
    told()
    assert moved == {metric.name for metric in METRICS} - SERVER - ENGINE


def test_identities_hold_behind_a_store_that_refuses_and_one_that_fails() -> None:
    """Seen in vllm#36752."""
    seen: list[Metrics] = []

    async def scene(manager: StorageManager) -> None:
        await store_and_lease(manager)
        seen.append(manager.metrics)

    with_tiers(scene, {"refusing": {"size": "1MiB"}})
    with_tiers(scene, {"memory": {"size": "1MiB", "wrappers": {"chaos": {"fail": 1.0}}}})
    for metrics in seen:
        snapshot = metrics.snapshot()
        assert check_identities(snapshot) == []
        assert snapshot.total("lmcache_tier_stores_asked_total") > 0
    assert seen[0].snapshot().total("lmcache_tier_refusals_total", reason="read-only") == len(KEYS)
