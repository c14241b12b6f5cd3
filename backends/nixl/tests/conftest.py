"""Targets, folders and tiers of a test."""

import asyncio
import contextlib
import hashlib
import os

import pytest
from lmcache_backend_nixl import NixlBackend
from lmcache_backend_nixl.agent import bindings
from lmcache_backend_nixl.config import NixlConfig
from lmcache_backend_nixl.serving import START, TargetServer

from lmcache_core.spi import ConfigError, Key, Load, LoadStatus, Secret, Store, StoreStatus
from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.testing.harness import run_real
from lmcache_core.testing.services import need_service

SPACE = hashlib.sha256(b"space").digest()


def pytest_runtest_setup(item):
    problem = None
    try:
        bindings()
    except ConfigError as error:
        problem = str(error)
    need_service("nixl", problem, start=START)


def key(number):
    return Key(SPACE, hashlib.sha256(b"%d" % number).digest())


def value(number, nbytes):
    return hashlib.shake_128(b"%d" % number).digest(64) * (nbytes // 64) + b"%d" % number


class Rig:
    """An open tier, and single verbs on it."""

    def __init__(self, backend):
        self.backend = backend
        self.key, self.value = key, value

    async def put(self, number, nbytes=6400):
        stores = [Store(key(number), (memoryview(value(number, nbytes)),))]
        return (await self.backend.store(stores))[0]

    async def keep(self, *numbers, nbytes=6400):
        for number in numbers:
            stored = await self.put(number, nbytes)
            assert stored.status is StoreStatus.STORED, stored

    async def get(self, number, nbytes=6400):
        wanted = value(number, nbytes)
        buffer = bytearray(len(wanted))
        (loaded,) = await self.backend.load([Load(key(number), (memoryview(buffer),))])
        return loaded, bytes(buffer)

    async def has(self, *numbers, nbytes=6400):
        """Whether all of these load, byte for byte."""
        for number in numbers:
            loaded, buffer = await self.get(number, nbytes)
            if loaded.status is not LoadStatus.FILLED or buffer != value(number, nbytes):
                return False
        return True

    async def lookup(self, *numbers):
        return [f and f.nbytes for f in await self.backend.lookup([key(n) for n in numbers])]


@contextlib.asynccontextmanager
async def opened(**options):
    backend = NixlBackend(NixlConfig(**options), real_context())
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
    """Run a coroutine; one that takes longer than 40 s fails."""
    return lambda main: run_real(main, 40.0)


@pytest.fixture
def eventually():
    """Await a condition of the outside world."""

    async def wait(condition, seconds=15.0):
        end = asyncio.get_running_loop().time() + seconds
        while not await condition():
            assert asyncio.get_running_loop().time() < end, "it did not come about"
            await asyncio.sleep(0.02)

    return wait


@pytest.fixture
def lend(tmp_path):
    """Start targets."""
    with contextlib.ExitStack() as stack:

        def lend(nbytes=64 << 20, *flags):
            folder = tmp_path / os.urandom(2).hex()
            folder.mkdir()
            return stack.enter_context(TargetServer(folder, nbytes, *flags))

        yield lend


@pytest.fixture(scope="module")
def weed(tmp_path_factory):
    """A SeaweedFS."""
    serving = pytest.importorskip("lmcache_backend_s3.serving")
    program = serving.find_server()
    need_service("nixl", None if program else "no weed (SeaweedFS) here", start=serving.START)
    with serving.SeaweedServer(program, tmp_path_factory.mktemp("weed")) as found:
        yield found


@pytest.fixture
def objects():
    """Options of a tier on a SeaweedFS."""

    def options(weed, **params):
        from lmcache_backend_s3.serving import BUCKET, KEYS

        params = {
            "endpoint_override": weed.endpoint, "scheme": "http", "use_virtual_addressing": False,
            "bucket": BUCKET, "region": "us-east-1", "req_checksum": "required", **params,
        }  # fmt: skip
        keys = {"access_key": Secret(KEYS[0]), "secret_key": Secret(KEYS[1])}
        return {"backend": "OBJ", "params": params, **keys}

    return options
