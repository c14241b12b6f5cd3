"""Servers of a test, and a tier on one of them."""

import asyncio
import contextlib
import hashlib
import os
import socket

import pytest
from lmcache_backend_redis import RedisBackend
from lmcache_backend_redis.config import RedisConfig
from lmcache_backend_redis.resp import command
from lmcache_backend_redis.serving import START, RedisServer, find_server

from lmcache_core.spi import Key, Load, LoadStatus, Store, StoreStatus
from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.testing.harness import run_real
from lmcache_core.testing.services import Serving, free_port, need_service

SPACE = hashlib.sha256(b"space").digest()
MIB = 1 << 20


def key(number):
    return Key(SPACE, hashlib.sha256(b"%d" % number).digest())


def value(number, nbytes=5000):
    return hashlib.shake_128(b"%d" % number).digest(nbytes)


class Rig:
    """An open tier, and single verbs on it."""

    def __init__(self, backend):
        self.backend = backend
        self.key, self.value = key, value

    async def put(self, number, nbytes=5000, ttl=None):
        (stored,) = await self.backend.store(
            [Store(key(number), (memoryview(value(number, nbytes)),), ttl)]
        )
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

    async def listing(self, limit=10):
        keys, foreign, after = [], [], None
        while True:
            page = await self.backend.scan(after, limit=limit)
            assert len(page.values) <= limit
            keys += [one for one, _ in page.values]
            foreign += page.foreign
            if (after := page.after) is None:
                return keys, foreign


@contextlib.asynccontextmanager
async def opened(url, **options):
    """A tier on a server; short patience unless told otherwise."""
    patience = {"timeout": 0.4, "connect_timeout": 0.4}
    backend = RedisBackend(RedisConfig(url=url, **(patience | options)), real_context())
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
    """Run a coroutine; one that takes longer than 20 s fails."""
    return lambda main: run_real(main, 20.0)


@pytest.fixture
def eventually():
    """Await a condition of the outside world."""

    async def wait(condition, seconds=15.0):
        end = asyncio.get_running_loop().time() + seconds
        while not await condition():
            assert asyncio.get_running_loop().time() < end, "it did not come about"
            await asyncio.sleep(0.02)

    return wait


class Sentinel(Serving):
    """One sentinel on a port of the loopback."""

    def __init__(self, program, settings, port):
        super().__init__([program, str(settings), "--sentinel"], folder=settings.parent)
        self.port = port

    def ready(self):
        return self.ask("PING").startswith(b"+PONG")

    def ask(self, *words):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), 5) as sock,
        ):
            sock.sendall(command(*(word.encode() for word in words)))
            return sock.recv(65536)
        return b""


@pytest.fixture
def start(tmp_path):
    """Start anything that ends with the test."""
    with contextlib.ExitStack() as stack:
        yield stack.enter_context


def program_of(name):
    program = find_server(f"{name}-server")
    need_service(name, None if program else f"no {name}-server here", start=START)
    return program


@pytest.fixture
def serve(tmp_path, start):
    """Start servers."""

    def serve(*flags, name="redis", tcp=False):
        folder = tmp_path / os.urandom(2).hex()
        folder.mkdir()
        port = free_port(55_000) if tcp else 0
        return start(RedisServer(program_of(name), folder, *flags, port=port))

    return serve


@pytest.fixture
def watch(tmp_path, start):
    """Start a sentinel that watches a master under the name ``kv``."""

    def watch(master):
        port, settings = free_port(55_000), tmp_path / "sentinel.conf"
        settings.write_text(
            f"port {port}\nsentinel monitor kv 127.0.0.1 {master.port} 1\n"
            "sentinel down-after-milliseconds kv 300\nsentinel failover-timeout kv 2000\n"
        )
        return start(Sentinel(program_of("redis"), settings, port))

    return watch
