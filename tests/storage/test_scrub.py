"""What nobody asks for is read and verified all the same, slowly."""

import asyncio

import pytest

from lmcache_core.spi import ByteSize, ConfigError, Unavailable
from lmcache_core.testing.simulation import run_simulated
from lmcache_core.testing.worlds import make_manager, put
from tests.storage.test_admin import FRAME, KEYS, Store, run


def spoil(store, key):
    value = store.memory._values[key]
    whole = bytearray(value.content)
    whole[-1] ^= 1
    store.memory._values[key] = value._replace(content=bytes(whole))


def test_damage_at_rest_is_found_removed_and_counted():
    async def body(manager, store):
        put(manager, KEYS)
        await manager.flush()
        manager.pool.drop(KEYS)
        spoil(store, KEYS[3])
        await asyncio.sleep(500)
        assert store.holds() == [True] * 3 + [False] + [True] * 4
        count = manager.metrics.snapshot().total
        assert count("lmcache_tier_damaged_total", tier="disk") == 1
        rounds = count("lmcache_tier_scrub_rounds_total", tier="disk")
        assert rounds >= 2
        assert count("lmcache_tier_scrubbed_chunks_total") >= 7 * (rounds - 1)
        put(manager, KEYS[3:4])
        await manager.flush()
        assert all(store.holds())

    run(body, Store(scrub=ByteSize(FRAME)))


def test_no_more_is_read_than_the_rate_allows():
    async def body(manager, store):
        put(manager, KEYS)
        await manager.flush()
        before = manager.metrics.snapshot().total("lmcache_tier_scrubbed_bytes_total")
        await asyncio.sleep(600)
        read = manager.metrics.snapshot().total("lmcache_tier_scrubbed_bytes_total") - before
        assert 0 < read <= 600 * FRAME / 4 + FRAME

    run(body, Store(scrub=ByteSize(FRAME // 4), seconds=0.5))


def test_a_store_that_fails_is_asked_again_later():
    async def body(manager, store):
        put(manager, KEYS)
        await manager.flush()
        store.flaky.failures += [Unavailable("down")] * 5
        await asyncio.sleep(600)
        assert manager.metrics.snapshot().total("lmcache_tier_damaged_total") == 0
        assert not store.flaky.failures
        await asyncio.sleep(300)
        assert manager.metrics.snapshot().total("lmcache_tier_scrub_rounds_total") >= 1
        assert all(store.holds())

    run(body, Store(scrub=ByteSize(1 << 20)))


def test_a_shared_tier_is_checked_from_one_place():
    async def main():
        with pytest.raises(ConfigError, match="lmcache check"):
            await make_manager([Store(shared=True, scrub=ByteSize(1)).tier()]).open()

    run_simulated(main())
