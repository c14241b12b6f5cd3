"""The laws, on a pretended server, on the same by a pretended RDMA device, and on the real server where it was made."""

import pytest
from lmcache_backend_infinistore import InfiniStoreBackend
from lmcache_backend_infinistore.config import InfiniStoreConfig
from lmcache_backend_infinistore.faking import FakeRdma, FakeServer
from lmcache_backend_infinistore.link import Link
from lmcache_backend_infinistore.marker import Marker, unpack
from lmcache_backend_infinistore.serving import PROGRAM, START, InfiniServer, find_server

from lmcache_core.testing.backend import BackendTests
from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.testing.services import need_service
from lmcache_core.testing.stateful import StatefulBackendTests


def real(folder):
    program = find_server()
    need_service("infinistore", None if program else f"no {PROGRAM} here", start=START)
    return InfiniServer(program, folder)


@pytest.fixture(scope="module", params=["fake", "fake rdma", "real"])
def world(request, tmp_path_factory):
    """(class, options, server)."""
    # A busy machine may hold up a server for a second; the laws are not about that.
    kind, options = InfiniStoreBackend, {"timeout": 10.0}
    real_one = request.param == "real"
    with real(tmp_path_factory.mktemp("i")) if real_one else FakeServer() as server:
        if request.param == "fake rdma":
            connect = staticmethod(lambda _: FakeRdma(server))
            kind = type("ByRdma", (InfiniStoreBackend,), {"connect": connect})
            options["device"] = "stub0"
        yield kind, options, server


class TestInfiniStore(BackendTests, StatefulBackendTests):
    plugin = "infinistore"
    own_threads = ("fake-infinistore",)
    examples, steps = 3, 25

    @pytest.fixture(autouse=True)
    def _world(self, world):
        self.kind, self.options, self.server = world
        self.small = None
        yield
        if self.small is not None:
            self.small.__exit__()

    def config(self, server):
        return InfiniStoreConfig(url=server.url, **self.options)

    def make_backend(self):
        return self.kind(self.config(self.server), real_context())

    def make_small_backend(self, nbytes):
        if not isinstance(self.server, FakeServer) or "device" in self.options:
            return None  # the real one evicts
        self.small = FakeServer(limit=nbytes + (1 << 20)).__enter__()
        return InfiniStoreBackend(self.config(self.small), real_context())

    def reopen(self, store):
        return self.kind(store.config, real_context())

    def crash(self, store):
        """The connections of a process end with it."""
        for link in store._idle_links:
            link.close()
        return self.reopen(store)

    def link(self):
        return Link(self.config(self.server).place, 5.0)

    def peek(self, key):
        link, name = self.link(), f"lmcache:{key.text}".encode()
        try:
            nbytes = link.size(name)
            if nbytes is None:
                return None
            raw = bytearray(nbytes)
            link.fill([memoryview(raw)])
            marker = unpack(name, bytes(raw))
            assert link.size(marker.value_name(name)) == marker.nbytes
            value = bytearray(marker.nbytes)
            link.fill([memoryview(value)])
            return bytes(value)
        finally:
            link.close()

    def poke(self, key, value):
        link, name = self.link(), f"lmcache:{key.text}".encode()
        marker = Marker(len(value), bytes(16))
        assert link.put(marker.value_name(name), [memoryview(value)]) == 200
        assert link.put(name, [memoryview(marker.pack(name))]) == 200
        link.close()

    def damage(self, key):
        self.poke(key, b"other")
