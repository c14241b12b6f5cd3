"""What a tier knows after a restart, however deletions and its recovery come together."""

import asyncio

import pytest

from lmcache_core.spi import BackendError, Unavailable
from lmcache_core.testing.simulation import run_simulated
from lmcache_core.testing.worlds import put
from tests.storage.test_admin import KEYS, Store, restarted


def test_a_deletion_that_fails_before_recovery_came_by_is_charged_and_made_good():
    async def body():
        store = Store()
        first = await restarted(store)
        put(first, KEYS)
        await first.aclose()
        scan, listed = store.late.scan, asyncio.Event()

        async def late(*args, **how):
            await listed.wait()
            return await scan(*args, **how)

        store.late.scan = late
        manager = await restarted(store)
        tier = manager.tiers[0]
        store.flaky.failures = [Unavailable("not now")]
        with pytest.raises(BackendError):
            await manager.delete(KEYS[:1])
        listed.set()
        await tier.complete.wait()
        assert all(store.holds())
        assert tier.holdings.used == store.memory._nbytes
        assert (await manager.lookup(KEYS)).places[0] is None
        put(manager, KEYS[:1])
        await manager.flush()
        assert tier.holdings.used == store.memory._nbytes
        assert (await manager.lookup(KEYS)).places[0] is not None
        await asyncio.sleep(10)
        manager.check()
        await manager.aclose()

    run_simulated(body())
