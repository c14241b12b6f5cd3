"""A tier in another daemon, under a manager, and when that daemon goes."""

import asyncio
from types import SimpleNamespace

import pytest
from lmcache_backend_lmcache import LMCacheBackend
from lmcache_backend_lmcache.config import LMCacheConfig

from lmcache_core.config import load
from lmcache_core.frame import open_header
from lmcache_core.spi import ConfigError, Load, Secret, Store, StoreStatus, Unavailable
from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.wire.address import Address
from tests.wire.daemons import ROOM, Daemon, fill, free_port, key


def elsewhere(path):
    """A client of another node finds no such socket there."""
    return Address(path=f"{path}.of-another-node")


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


def test_a_frame_is_kept_by_a_daemon_on_another_node_and_read_by_its_clients(tmp_path, monkeypatch):
    """Over plain TCP the daemon keeps what is sealed for its key and nothing else."""
    monkeypatch.setattr("lmcache_core.wire.connection.Address", elsewhere)

    async def body(daemon):
        url = f"lmcache://127.0.0.1:{daemon.port}"
        backend = LMCacheBackend(LMCacheConfig(url, Secret("t"), 20.0), real_context())
        await backend.open()
        frame = bytearray(ROOM + 5000)
        fill(SimpleNamespace(view=memoryview(frame), key=key(1)), 1)
        (stored,) = await backend.store([Store(key(1), (memoryview(frame),))])
        assert stored.status is StoreStatus.STORED, stored
        back = bytearray(len(frame))
        (loaded,) = await backend.load([Load(key(1), (memoryview(back),))])
        assert loaded.error is None and back == frame
        await backend.aclose()
        near = daemon.client()
        found = near.load([key(1)], None)
        assert found.leases[0].identity == open_header(memoryview(frame), key(1)).identity
        near.release(found.leases)
        near.close()

    with Daemon(tmp_path, port=free_port(), token="t") as daemon:
        asyncio.run(asyncio.wait_for(body(daemon), 60))
