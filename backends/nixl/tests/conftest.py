"""Targets, folders and tiers of a test."""

import contextlib
import hashlib
import os

import pytest
from lmcache_backend_nixl import NixlBackend
from lmcache_backend_nixl.agent import bindings
from lmcache_backend_nixl.config import NixlConfig
from lmcache_backend_nixl.serving import START, TargetServer

from lmcache_core.spi import ConfigError, Secret
from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.testing.harness import run_real
from lmcache_core.testing.rig import eventually, opened
from lmcache_core.testing.services import Etcd, find_program, need_service

SPACE = hashlib.sha256(b"space").digest()


def pytest_runtest_setup(item):
    problem = None
    try:
        bindings()
    except ConfigError as error:
        problem = str(error)
    need_service("nixl", problem, start=START)


def value(number, nbytes):
    return hashlib.shake_128(b"%d" % number).digest(64) * (nbytes // 64) + b"%d" % number


def on(**options):
    return opened(NixlBackend(NixlConfig(**options), real_context()), value=value)


@pytest.fixture
def tier():
    return on


@pytest.fixture
def drive():
    """Run a coroutine; one that takes longer than 40 s fails."""
    return lambda main: run_real(main, 40.0)


@pytest.fixture(name="eventually")
def _eventually():
    """Await a condition of the outside world."""
    return eventually


@pytest.fixture
def lend(tmp_path):
    """Start targets."""
    with contextlib.ExitStack() as stack:

        def lend(nbytes=64 << 20, *flags):
            folder = tmp_path / os.urandom(2).hex()
            folder.mkdir()
            return stack.enter_context(TargetServer(folder, nbytes, *flags))

        yield lend


@pytest.fixture
def etcd(tmp_path):
    """An etcd that is not started yet."""
    program = find_program("etcd")
    need_service("nixl", None if program else "no etcd here", start="bash .ci/system.sh")
    folder = tmp_path / "etcd"
    folder.mkdir()
    found = Etcd(program, folder)
    yield found
    found.kill()


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
