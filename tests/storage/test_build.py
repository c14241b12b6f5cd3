"""From records to an open manager."""

from __future__ import annotations

import asyncio

import pytest

from lmcache_core.clock import SystemClock
from lmcache_core.config import Config, EngineConfig, PluginChoice, Share, TenantConfig, TierConfig
from lmcache_core.observers import Metrics
from lmcache_core.registry import Offer, Registry
from lmcache_core.spi import ByteSize, ConfigError
from lmcache_core.storage import Reason
from lmcache_core.storage.build import Builder, build, default_context, fidelity
from lmcache_core.storage.sync import SyncManager
from lmcache_core.testing.worlds import PAGE, fill, frame_nbytes, key_of, put, verify_lease
from lmcache_core.wrappers import ChaosOptions
from tests.wrappers.serdes import LossyOptions, Squeeze

KEYS = [key_of(i) for i in range(4)]
OFFERS = [
    Offer("backends", "memory", "lmcache_core.memory.backend:MemoryBackend"),
    Offer("policies", "lru", "lmcache_core.policies.lru:LRU"),
    Offer("policies", "fifo", "lmcache_core.policies.fifo:FIFO"),
    Offer("serdes", "squeeze", "tests.wrappers.serdes:Squeeze"),
    Offer("serdes", "lossy", "tests.wrappers.serdes:Lossy"),
]
MEMORY = TierConfig(plugin="memory", name="below", size=ByteSize(1 << 20))


def registry():
    return Registry(find=lambda: OFFERS, catalogue=(), environment={})


def config(*tiers, **settings):
    return Config(tiers=tiers, **settings)


def tier(**settings):
    return TierConfig(plugin="memory", name="below", size=ByteSize(1 << 20), **settings)


def layers(backend):
    names = [type(backend).__name__]
    while (backend := getattr(backend, "inner", None)) is not None:
        names.append(type(backend).__name__)
    return names


def test_wrappers_lie_in_one_order_however_they_are_written():
    wanted = {"chaos": ChaosOptions(), "check": None, "retry": False}
    chain = (PluginChoice(name="squeeze"),)
    made = tier(wrappers=wanted, serde=chain)
    builder = Builder(config(made), registry(), Metrics(), default_context)
    names = layers(builder.tier(made).backend)
    assert names == ["Check", "Measured", "Limit", "Breaker", "Encoded", "Chaos", "MemoryBackend"]
    names[names.index("Encoded")] = "Ladder"
    assert layers(builder.tier(tier(wrappers=wanted, ladder=((), chain))).backend) == names
    plain = layers(builder.tier(MEMORY).backend)
    assert plain == ["Measured", "Limit", "Breaker", "Retry", "Check", "MemoryBackend"]


def test_without_a_resident_tier_there_is_a_small_pool_to_pass_through():
    """Seen in dynamo#5012."""

    async def main():
        manager = await build(config(MEMORY), registry())
        assert manager.context.tier == "staging"
        assert manager.pool.capacity == 256 << 20
        assert all(put(manager, KEYS))
        await manager.flush()
        await manager.clear(tier="staging")
        loaded = await manager.load(KEYS, "me")
        assert loaded.reason is Reason.COMPLETE
        manager.release(loaded.leases)
        manager.check()
        await manager.aclose()

    asyncio.run(main())


def test_encoded_tiers_give_the_same_bytes_and_are_charged_what_they_hold():
    async def main():
        made = tier(serde=(PluginChoice(name="squeeze"),))
        manager = await build(config(made), registry())
        await manager.store([(KEYS[0], memoryview(bytes(100_000)))])
        holdings = manager.tiers[0].holdings
        assert 0 < holdings.used < 10_000
        manager.pool.drop(KEYS)
        room = memoryview(bytearray(b"\x01") * 100_000)
        assert await manager.load_into(KEYS[:1], [room]) == 1
        assert bytes(room) == bytes(100_000)
        manager.check()
        await manager.aclose()

    asyncio.run(main())


def test_an_exact_engine_refuses_a_lossy_tier():
    """Seen in LMCache#717."""

    async def main():
        made = tier(serde=(PluginChoice(name="lossy"),))
        await build(config(made, engine=EngineConfig(exact=True)), registry())

    with pytest.raises(ConfigError, match=r"'lossy' is lossy \(15\), and the engine is exact"):
        asyncio.run(main())


def test_values_are_not_encoded_where_they_are_used():
    offers = [*OFFERS, Offer("backends", "here", "tests.wrappers.serdes:Here")]
    plugins = Registry(find=lambda: offers, catalogue=(), environment={})
    made = TierConfig(plugin="here", name="here", serde=(PluginChoice(name="squeeze"),))
    with pytest.raises(ConfigError, match="give the serde to a tier below"):
        asyncio.run(build(config(made), plugins))


def test_fidelity_names_what_loses_something_and_how():
    """Seen in LMCache#717."""
    exact = tier(serde=(PluginChoice(name="squeeze"),))
    assert fidelity(config(exact), registry()) == "exact"
    options = LossyOptions(keep=3)
    lossy = tier(serde=(PluginChoice(name="lossy", options=options), PluginChoice(name="squeeze")))
    assert fidelity(config(exact, lossy), registry()) == "approx:lossy(keep=3)"
    plain = tier(serde=(PluginChoice(name="lossy"),))
    assert fidelity(config(lossy, plain), registry()) == "approx:lossy+lossy(keep=3)"
    ladder = tier(ladder=((), (PluginChoice(name="squeeze"),), lossy.serde))
    assert fidelity(config(exact, ladder), registry()) == "approx:lossy(keep=3)"


def test_what_an_earlier_configuration_wrote_is_read_by_the_plugin_of_that_name():
    builder = Builder(config(MEMORY), registry(), Metrics(), default_context)
    chain = builder.chain(MEMORY, (PluginChoice(name="lossy"),))
    assert isinstance(chain.find("squeeze"), Squeeze)
    assert chain.find("gone") is None


def test_two_tiers_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two tiers are named 'below'"):
        asyncio.run(build(config(MEMORY, MEMORY), registry()))


def test_quotas_of_tiers_come_before_those_of_tenants():
    tenants = {"a": TenantConfig(quota=Share(0.5)), "default": TenantConfig(quota=ByteSize(1000))}
    made = tier(quotas={"a": ByteSize(10)})
    builder = Builder(config(made, tenants=tenants), registry(), Metrics(), default_context)
    assert builder.quota(made, "a", 1 << 20) == 10
    assert builder.quota(MEMORY, "a", 1 << 20) == 1 << 19
    assert builder.quota(MEMORY, "b", 1 << 20) == 1000


def sync_manager():
    return SyncManager(lambda: build(config(MEMORY), registry()))


def test_a_caller_without_a_loop_gets_the_same_verbs():
    manager = sync_manager()
    grants = manager.reserve([(key, frame_nbytes(PAGE)) for key in KEYS], "me", tags=["x"])
    for each in grants:
        manager.abort(each)
    grants = manager.reserve([(key, frame_nbytes(PAGE)) for key in KEYS], "me")
    assert all(manager.commit_batch(grants, [fill(each) for each in grants]))
    assert manager.lookup(KEYS).leading == 4
    assert manager.flush()
    manager.manager.pool.drop(KEYS[2:])
    assert [place.tier for place in manager.lookup(KEYS).places] == ["staging"] * 2 + ["below"] * 2
    loaded = manager.load(KEYS, "me", deadline=SystemClock().now() + 10)
    assert loaded.reason is Reason.COMPLETE
    for lease in loaded.leases:
        verify_lease(lease)
    manager.release(loaded.leases)
    assert manager.delete(KEYS[:1]) == 2
    assert manager.call(manager.manager.clear()) == 6
    assert not manager.close().errors


def test_resident_loads_do_not_touch_the_loop(monkeypatch):
    manager = sync_manager()
    grants = manager.reserve([(key, frame_nbytes(PAGE)) for key in KEYS], "me")
    manager.commit_batch(grants, [fill(each) for each in grants])

    def hop(*_args, **_options):
        raise AssertionError("hopped to the loop")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "run_coroutine_threadsafe", hop)
        loaded = manager.load(KEYS, "me")
        assert loaded.reason is Reason.COMPLETE
        assert manager.lookup(KEYS).leading == 4
        manager.release(loaded.leases)
    manager.close()


def test_what_cannot_be_built_is_raised_in_the_callers_thread():
    with pytest.raises(ConfigError):
        SyncManager(lambda: build(config(MEMORY, MEMORY), registry()))
