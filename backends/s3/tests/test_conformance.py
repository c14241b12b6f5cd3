"""The laws, on a pretended server and on a real one: one class, so that no fake is kinder than the truth."""

import dataclasses
import itertools

import pytest
from lmcache_backend_s3 import S3Backend
from lmcache_backend_s3.faking import PretendedServer
from lmcache_backend_s3.serving import START, SeaweedServer, find_server
from lmcache_backend_s3.transport import Call

from lmcache_core.spi import ByteSize
from lmcache_core.testing.backend import BackendTests
from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.testing.services import need_service
from lmcache_core.testing.stateful import StatefulBackendTests

_numbers = itertools.count()


@pytest.fixture(scope="module", params=["moto", "seaweed"])
def server(request, tmp_path_factory):
    if request.param == "moto":
        made = PretendedServer()
    else:
        program = find_server()
        need_service("s3", None if program else "no weed (SeaweedFS) here", start=START)
        made = SeaweedServer(program, tmp_path_factory.mktemp("weed"))
    with made:
        yield made


class TestS3(BackendTests, StatefulBackendTests):
    plugin = "s3"
    own_threads = ("Thread-",)  # moto serves on threads of this process
    examples, steps = 3, 20

    @pytest.fixture(autouse=True)
    def _server(self, server):
        self.server, self.bucket = server, server.bucket()

    def make_backend(self):
        self.config = self.server.config(f"kit{next(_numbers)}")
        self.backend = S3Backend(self.config, real_context())
        return self.backend

    def make_small_backend(self, nbytes):
        config = dataclasses.replace(self.server.config("small"), max_capacity=ByteSize(nbytes))
        return S3Backend(config, real_context())

    def reopen(self, store):
        return S3Backend(store.config, real_context())

    crash = reopen

    def peek(self, key):
        got = bytearray(999)
        name = self.backend.name(key)
        found = self.bucket.get(name, Call(), lambda total, etag: [memoryview(got)[:total]])
        return None if found is None else bytes(got[:found])

    def poke(self, key, value):
        name = self.backend.name(key)
        self.bucket.put(name, [memoryview(value)], Call(), only_new=False)

    def damage(self, key):
        self.poke(key, b"other")
