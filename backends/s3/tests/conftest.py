"""Servers for the tests: a pretended S3 (moto) and a real one (SeaweedFS)."""

import hashlib
import itertools
import logging

import pytest
from lmcache_backend_s3.serving import BUCKET, START, SeaweedServer, find_server
from lmcache_backend_s3.transport import Call

from lmcache_core.spi import Key, Load, Store
from lmcache_core.testing.services import need_service

_numbers = itertools.count()


class Moto(SeaweedServer):
    """moto's S3 on threads of this process; takes any credentials."""

    def __init__(self):
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)

    def __enter__(self):
        self._server.start()
        _, self.port = self._server.get_host_and_port()
        make_bucket(self, BUCKET)
        return self

    def __exit__(self, *error):
        self._server.stop()


def make_bucket(server, name):
    bucket = server.bucket(name)
    with bucket._ask(Call(), "PUT", "") as response:
        assert response.status == 200, response.read()


def real(folder, *flags):
    """A real server, or a skip that says how to get one."""
    program = find_server()
    need_service("s3", None if program else "no weed (SeaweedFS) here", start=START)
    return SeaweedServer(program, folder, *flags)


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory):
    with real(tmp_path_factory.mktemp("weed")) as found:
        yield found


@pytest.fixture(scope="session")
def moto():
    with Moto() as found:
        yield found


@pytest.fixture
def prefix():
    """A part of the bucket that no test used before."""
    return f"t{next(_numbers)}"


def key(number):
    return Key(hashlib.sha256(b"space").digest(), hashlib.sha256(b"%d" % number).digest(), 1)


def put(number, value):
    return Store(key(number), (memoryview(value),))


def get(number, room):
    return Load(key(number), (memoryview(bytearray(room)),))
