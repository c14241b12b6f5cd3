"""Masters and segments of a test, and a tier on one of them."""

import asyncio
import contextlib
import hashlib
import os

import pytest
from lmcache_backend_mooncake import MooncakeBackend
from lmcache_backend_mooncake.native import problem
from lmcache_backend_mooncake.serving import START, MooncakeServer, find_server

from lmcache_core.spi import Key, Load, LoadStatus, Store, StoreStatus
from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.testing.harness import run_real
from lmcache_core.testing.services import need_service

SPACE = hashlib.sha256(b"space").digest()
MIB = 1 << 20
FLAGS = ("--client_ttl=2",)


@pytest.fixture(scope="session")
def make_server():
    """Make a master and a segment in a folder, that notices soon who has died."""
    found = find_server()
    need_service("mooncake", None if found else problem(), start=START)

    def make_server(folder, *flags, nbytes=64 * MIB):
        return MooncakeServer(found, folder, *FLAGS, *flags, nbytes=nbytes)

    return make_server


def key(number):
    return Key(SPACE, hashlib.sha256(b"%d" % number).digest())


def value(number, nbytes=5000):
    return hashlib.shake_128(b"%d" % number).digest(nbytes)


class Rig:
    """An open tier, and single verbs on it."""

    def __init__(self, backend):
        self.backend = backend

    async def put(self, number, nbytes=5000):
        store = Store(key(number), (memoryview(value(number, nbytes)),))
        (stored,) = await self.backend.store([store])
        return stored

    async def keep(self, *numbers, nbytes=5000):
        for number in numbers:
            stored = await self.put(number, nbytes)
            assert stored.status is StoreStatus.STORED, stored

    async def get(self, number, nbytes=5000):
        """(result, bytes)."""
        buffer = bytearray(nbytes)
        (loaded,) = await self.backend.load([Load(key(number), (memoryview(buffer),))])
        return loaded, bytes(buffer)

    async def has(self, *numbers, nbytes=5000):
        """Whether all of these load, byte for byte."""
        for number in numbers:
            loaded, buffer = await self.get(number, nbytes)
            if loaded.status is not LoadStatus.FILLED or buffer != value(number, nbytes):
                return False
        return True

    async def lookup(self, *numbers):
        return list(await self.backend.lookup([key(number) for number in numbers]))


@contextlib.asynccontextmanager
async def opened(config):
    backend = MooncakeBackend(config, real_context())
    try:
        await backend.open()
        yield Rig(backend)
    finally:
        await backend.aclose()


@pytest.fixture
def tier():
    return opened


@pytest.fixture
def drive():
    """Run a coroutine; one that takes longer than 30 s fails."""
    return lambda main: run_real(main, 30.0)


@pytest.fixture
def eventually():
    """Await a condition of the outside world."""

    async def wait(condition, seconds=15.0):
        end = asyncio.get_running_loop().time() + seconds
        while not await condition():
            assert asyncio.get_running_loop().time() < end, "it did not come about"
            await asyncio.sleep(0.05)

    return wait


@pytest.fixture
def serve(make_server, tmp_path):
    """Start a master and a segment that end with the test."""
    with contextlib.ExitStack() as stack:

        def serve(*flags, nbytes=64 * MIB):
            folder = tmp_path / os.urandom(2).hex()
            folder.mkdir()
            return stack.enter_context(make_server(folder, *flags, nbytes=nbytes))

        yield serve
