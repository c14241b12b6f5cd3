"""The laws on a real server, and what becomes of one that dies, hangs or is full."""

import asyncio

import pytest
from lmcache_backend_memcached import MemcachedBackend
from lmcache_backend_memcached.config import MemcachedConfig
from lmcache_backend_memcached.serving import START, MemcachedServer

from lmcache_core.config import load
from lmcache_core.spi import (
    ConfigError,
    Duration,
    Key,
    Load,
    Store,
    StoreStatus,
    Unavailable,
)
from lmcache_core.testing.backend import BackendTests
from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.testing.harness import run_real
from lmcache_core.testing.services import find_program, need_service
from lmcache_core.testing.stateful import StatefulBackendTests


def serve(folder, *flags):
    program = find_program("memcached")
    need_service("memcached", None if program else "no memcached here", start=START)
    return MemcachedServer(program, folder, *flags)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("m")) as found:
        yield found


class TestMemcached(BackendTests, StatefulBackendTests):
    plugin = "memcached"
    ttl_s = 1.0  # the protocol knows whole seconds
    examples, steps = 4, 25

    @pytest.fixture(autouse=True)
    def _server(self, server, tmp_path):
        self.server, self.folder, self.small = server, tmp_path, None
        yield
        if self.small is not None:
            self.small.kill()

    def make_backend(self):
        return MemcachedBackend(MemcachedConfig(server=self.server.path), real_context())

    def make_small_backend(self, nbytes):
        self.small = serve(self.folder, "-M", "-m", "4", "-I", "1m").start()
        return MemcachedBackend(MemcachedConfig(server=self.small.path), real_context())

    def reopen(self, store):
        return MemcachedBackend(store.config, real_context())

    crash = reopen

    def peek(self, key):
        reply = self.server.command(b"get lmcache:" + key.text.encode())
        return None if reply == b"END\r\n" else reply.partition(b"\r\n")[2][: -len("\r\nEND\r\n")]

    def poke(self, key, value):
        line = b"set lmcache:%s 0 0 %d\r\n%s" % (key.text.encode(), len(value), value)
        assert self.server.command(line) == b"STORED\r\n"

    def damage(self, key):
        self.poke(key, b"other")


KEY = Key(bytes(32), bytes(32))


def test_server_that_dies_or_hangs_is_unavailable_and_found_again(tmp_path):
    async def main():
        with serve(tmp_path) as server:
            config = MemcachedConfig(server=server.path, timeout=Duration(0.5))
            backend = MemcachedBackend(config, real_context())
            await backend.open()
            value, into = memoryview(b"v" * 5000), memoryview(bytearray(5000))

            async def store():
                (stored,) = await backend.store([Store(KEY, (value,))])
                return stored

            assert (await store()).status is StoreStatus.STORED
            for spoil, mend in ((server.suspend, server.resume), (server.kill, server.start)):
                spoil()
                began = asyncio.get_running_loop().time()
                (loaded,) = await backend.load([Load(KEY, (into,))])
                assert isinstance(loaded.error, Unavailable)
                assert isinstance((await store()).error, Unavailable)
                with pytest.raises(Unavailable):
                    await backend.lookup([KEY])
                assert asyncio.get_running_loop().time() - began < 4
                mend()
                await backend.delete([KEY])
                # what was sent to a hanging server may arrive after the deletion
                assert (await store()).status in (StoreStatus.STORED, StoreStatus.PRESENT)
                assert (await backend.lookup([KEY]))[0].nbytes == 5000
            await backend.aclose()

    run_real(main(), 20.0)


def test_nobody_there_and_no_address_are_told_apart(tmp_path):
    async def main(server, error):
        backend = MemcachedBackend(MemcachedConfig(server=server), real_context())
        with pytest.raises(error):
            await backend.open()
        await backend.aclose()

    run_real(main(f"{tmp_path}/none", Unavailable), 5.0)
    run_real(main("cache", ConfigError), 5.0)
    with pytest.raises(ValueError, match="cannot begin a key"):
        MemcachedConfig(server="a:1", prefix="a b")


@pytest.mark.parametrize(
    ("server", "address"),
    [
        ("cache:1", ("cache", 1)),
        ("memcached://cache", ("cache", 11211)),
        ("memcached://cache:1/", ("cache", 1)),
        ("memcached://[::1]", ("::1", 11211)),
        ("memcached://[::1]:1", ("::1", 1)),
        ("/run/m.sock", "/run/m.sock"),
        ("memcached:///run/m.sock", "/run/m.sock"),
    ],
)
def test_server_is_named_as_elsewhere_or_by_its_known_url(server, address):
    assert MemcachedConfig(server=server).address == address
    if server.startswith("memcached:"):
        tier = load(env={}, flags={"remote_url": server}).config.tiers[-1]
        assert (tier.plugin, tier.options) == ("memcached", MemcachedConfig(server=server))


@pytest.mark.parametrize("server", ["cache", "cache:x", "memcached://", "memcached://u:p@cache:1"])
def test_server_that_is_none_is_refused(server):
    with pytest.raises(ConfigError, match="neither HOST:PORT nor a path") as error:
        assert MemcachedConfig(server=server).address
    assert "u:p" not in str(error.value)
