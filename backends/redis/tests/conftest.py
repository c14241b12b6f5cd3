"""Servers of a test, and a tier on one of them."""

import contextlib
import hashlib
import itertools
import os
import socket

import pytest
from lmcache_backend_redis import RedisBackend
from lmcache_backend_redis.config import RedisConfig
from lmcache_backend_redis.resp import command
from lmcache_backend_redis.serving import START, RedisServer, find_server

from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.testing.harness import run_real
from lmcache_core.testing.rig import eventually, opened
from lmcache_core.testing.services import Serving, free_port, need_service

_seeds = itertools.count()
SPACE = hashlib.sha256(b"space").digest()
MIB = 1 << 20


def on(url, **options):
    """A tier on a server; short patience unless told otherwise."""
    patience = {"timeout": 0.4, "connect_timeout": 0.4}
    context = real_context(seed=next(_seeds))  # no two draw the same random names
    return opened(RedisBackend(RedisConfig(url=url, **(patience | options)), context))


@pytest.fixture
def tier():
    return on


@pytest.fixture
def drive():
    """Run a coroutine; one that takes longer than 20 s fails."""
    return lambda main: run_real(main, 20.0)


@pytest.fixture(name="eventually")
def _eventually():
    """Await a condition of the outside world."""
    return eventually


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
