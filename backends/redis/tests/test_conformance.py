"""The laws, on a pretended server, a real Redis and a real Valkey: one class, so that no fake is kinder than the truth."""

import itertools
from typing import ClassVar

import pytest
from lmcache_backend_redis import RedisBackend
from lmcache_backend_redis.config import RedisConfig
from lmcache_backend_redis.faking import FakeServer
from lmcache_backend_redis.heads import Head
from lmcache_backend_redis.serving import START, RedisServer, find_server

from lmcache_core.spi import ByteSize
from lmcache_core.testing.backend import BackendTests
from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.testing.services import need_service
from lmcache_core.testing.stateful import StatefulBackendTests

_numbers = itertools.count()


def real(name, folder, *flags):
    """A real server, or a skip that says how to get one."""
    program = find_server(f"{name}-server")
    need_service(name, None if program else f"no {name}-server here", start=START)
    return RedisServer(program, folder, *flags)


@pytest.fixture(scope="module", params=["fake", "redis", "valkey"])
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("s")
    with FakeServer(folder) if request.param == "fake" else real(request.param, folder) as found:
        yield found


class TestRedis(BackendTests, StatefulBackendTests):
    plugin = "redis"
    own_threads = ("fake-redis",)
    examples, steps = 4, 25
    options: ClassVar[dict[str, object]] = {}

    @pytest.fixture(autouse=True)
    def _server(self, server, tmp_path):
        self.server, self.folder, self.small = server, tmp_path, None
        yield
        if self.small is not None:
            self.small.kill()

    def make_backend(self):
        prefix = f"kv*{next(_numbers)}:"
        self.config = RedisConfig(url=self.server.url, prefix=prefix, **self.options)
        return RedisBackend(self.config, real_context())

    def make_small_backend(self, nbytes):
        if isinstance(self.server, FakeServer):
            return None  # it knows no limit
        self.small = type(self.server)(
            self.server.program, self.folder, "--maxmemory", "4mb"
        ).start()
        return RedisBackend(RedisConfig(url=self.small.url, **self.options), real_context())

    def reopen(self, store):
        return RedisBackend(store.config, real_context())

    crash = reopen

    def peek(self, key):
        reply = self.server.command("GET", self.name(key))
        if isinstance(self.server, FakeServer):
            return reply
        return None if reply == b"$-1\r\n" else reply.partition(b"\r\n")[2][:-2]

    def poke(self, key, value):
        self.server.command("SET", self.name(key), value)

    def damage(self, key):
        self.poke(key, b"other")

    def name(self, key):
        return self.config.prefix + key.text


@pytest.mark.parametrize("server", ["redis"], indirect=True)
class TestRedisInParts(TestRedis):
    """The same where a string holds less than most of the laws' values."""

    options: ClassVar[dict[str, object]] = {"part_size": ByteSize(400)}

    def peek(self, key):
        head = Head.read(self._string(self.name(key)))
        names = head.names(self.name(key).encode()) if head else []
        return b"".join(map(self._string, names)) if head else super().peek(key)

    def _string(self, name):
        return self.server.command("GET", name).partition(b"\r\n")[2][:-2]
