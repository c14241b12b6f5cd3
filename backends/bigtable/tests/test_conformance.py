"""The laws, on Google's emulator."""

import pytest
from lmcache_backend_bigtable import BigtableBackend
from lmcache_backend_bigtable.serving import PROGRAM, START, Emulator

from lmcache_core.testing.backend import BackendTests
from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.testing.services import find_program, need_service


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    program = find_program(PROGRAM)
    need_service("bigtable", None if program else f"no {PROGRAM} here", start=START)
    with Emulator(program, tmp_path_factory.mktemp("bt")) as found:
        yield found


class TestBigtable(BackendTests):
    plugin = "bigtable"
    own_threads = ("Thread-",)  # grpc's, one per channel and call

    @pytest.fixture(autouse=True)
    def _emulator(self, emulator):
        self.config = emulator.config()

    def make_backend(self):
        self.backend = BigtableBackend(self.config, real_context())
        return self.backend

    def reopen(self, store):
        return BigtableBackend(store.config, real_context())

    crash = reopen

    def peek(self, key):
        into = bytearray(999)
        got = self.backend._get(key.text.encode(), [memoryview(into)], key)
        return None if got is None else bytes(into[:got])

    def poke(self, key, value):
        self.backend._put(key.text.encode(), [memoryview(value)])

    def damage(self, key):
        self.backend._delete(key.text.encode())
        self.backend._put(key.text.encode(), [memoryview(b"other")])
