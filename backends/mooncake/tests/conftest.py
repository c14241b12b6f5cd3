"""Masters and segments of a test, and a tier on one of them."""

import contextlib
import hashlib
import os

import pytest
from lmcache_backend_mooncake import MooncakeBackend
from lmcache_backend_mooncake.native import problem
from lmcache_backend_mooncake.serving import START, MooncakeServer, find_server

from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.testing.harness import run_real
from lmcache_core.testing.rig import eventually, opened
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


def on(config):
    return opened(MooncakeBackend(config, real_context()))


@pytest.fixture
def tier():
    return on


@pytest.fixture
def drive():
    """Run a coroutine; one that takes longer than 30 s fails."""
    return lambda main: run_real(main, 30.0)


@pytest.fixture(name="eventually")
def _eventually():
    """Await a condition of the outside world."""
    return eventually


@pytest.fixture
def serve(make_server, tmp_path):
    """Start a master and a segment that end with the test."""
    with contextlib.ExitStack() as stack:

        def serve(*flags, nbytes=64 * MIB):
            folder = tmp_path / os.urandom(2).hex()
            folder.mkdir()
            return stack.enter_context(make_server(folder, *flags, nbytes=nbytes))

        yield serve
