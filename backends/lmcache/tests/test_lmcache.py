"""A tier in another daemon, under a manager, and when that daemon goes."""

import asyncio

import pytest
from lmcache_backend_lmcache import LMCacheBackend
from lmcache_backend_lmcache.config import LMCacheConfig

from lmcache_core.config import load
from lmcache_core.spi import ConfigError, Load, Store, StoreStatus, Unavailable
from lmcache_core.testing.contexts import test_context as real_context
from tests.wire.daemons import Daemon, key


def test_remote_url_of_the_old_form_is_this_tier():
    config = load(env={}, flags={"remote_url": "lm://localhost:5555"}).config
    assert [tier.plugin for tier in config.tiers][-1] == "lmcache"
    assert config.tiers[-1].options.url == "lm://localhost:5555"


def test_no_daemon_is_unavailable_and_no_address_a_configuration_error(tmp_path):
    for url, error in ((f"unix://{tmp_path}/none.sock", Unavailable), ("lmcache://", ConfigError)):
        backend = LMCacheBackend(LMCacheConfig(url), real_context())
        with pytest.raises(error):
            asyncio.run(backend.open())


def test_killed_daemon_is_unavailable_and_found_again(tmp_path):
    """Seen in LMCache#2088."""

    async def body(daemon):
        backend = LMCacheBackend(LMCacheConfig(f"unix://{daemon.path}"), real_context())
        await backend.open()
        value = memoryview(b"v" * 5000)
        (stored,) = await backend.store([Store(key(1), (value,))])
        assert stored.status is StoreStatus.STORED
        daemon.kill()
        (loaded,) = await backend.load([Load(key(1), (memoryview(bytearray(5000)),))])
        assert isinstance(loaded.error, Unavailable)
        with pytest.raises(Unavailable):
            await backend.lookup([key(1)])
        daemon.start()
        for _ in range(100):
            await asyncio.sleep(0.05)
            (stored,) = await backend.store([Store(key(1), (value,))])
            if stored.status is StoreStatus.STORED:
                break
        assert (await backend.lookup([key(1)]))[0].nbytes == 5000
        await backend.aclose()

    with Daemon(tmp_path, "--arena-mode", "shared-rw") as daemon:
        asyncio.run(asyncio.wait_for(body(daemon), 30))
