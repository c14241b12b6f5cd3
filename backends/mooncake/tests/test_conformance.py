"""The laws, on a pretended store and on a real master with a real segment: one class, so that the fake is not kinder.

The library takes a second to end a client, so the instances of the real one share theirs here; other tests do not.
"""

import ctypes
import itertools

import pytest
from lmcache_backend_mooncake import MooncakeBackend
from lmcache_backend_mooncake.config import MooncakeConfig
from lmcache_backend_mooncake.faking import FakeMooncake, FakeStore
from lmcache_backend_mooncake.native import address, connect, problem
from lmcache_backend_mooncake.serving import START, MooncakeServer, find_server

from lmcache_core.testing.backend import BackendTests
from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.testing.services import need_service
from lmcache_core.testing.stateful import StatefulBackendTests

_numbers = itertools.count()


class Shared:
    """A client of the library that outlives the tiers on it."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)

    def close(self):
        """Not yet."""


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """The server, the tier's class on one client, and that client, to look behind the tier's back."""
    program, folder = find_server(), tmp_path_factory.mktemp("m")
    need_service("mooncake", None if program else problem(), start=START)
    with MooncakeServer(program, folder, "--client_ttl=2", nbytes=64 << 20) as found:
        store, how = connect(found.config())
        kind = type(
            "Pooled", (MooncakeBackend,), {"connect": staticmethod(lambda _: (Shared(store), how))}
        )
        yield kind, found, store, how
        store.close()


@pytest.fixture(params=["fake", "fake rdma", "real"])
def world(request):
    """(class, configuration, store behind its back, how)."""
    number = next(_numbers)
    if request.param == "real":
        kind, server, store, how = request.getfixturevalue("real")
        return kind, server.config(prefix=f"kv{number}:"), store, how
    protocol = "rdma" if request.param == "fake rdma" else "tcp"
    config = MooncakeConfig(url=f"mooncakestore://{number}:1", protocol=protocol)
    values = FakeMooncake.stores.setdefault(config.url, {})
    return FakeMooncake, config, FakeStore(values, MooncakeConfig(url=config.url)), None


class TestMooncake(BackendTests, StatefulBackendTests):
    plugin = "mooncake"
    examples, steps = 2, 25

    @pytest.fixture(autouse=True)
    def _world(self, world):
        self.kind, self.config, self.store, self.how = world

    def make_backend(self):
        return self.kind(self.config, real_context())

    def reopen(self, store):
        return self.kind(store.config, real_context())

    crash = reopen

    def peek(self, key):
        name = self.config.prefix + key.text
        nbytes = self.store.get_size(name)
        if nbytes < 0:
            return None
        into = ctypes.create_string_buffer(nbytes)
        assert self.store.batch_get_into([name], [ctypes.addressof(into)], [nbytes]) == [nbytes]
        return into.raw

    def poke(self, key, value):
        view = memoryview(value)
        name = self.config.prefix + key.text
        assert self.store.batch_put_from([name], [address(view)], [len(value)], self.how) == [0]

    def damage(self, key):
        self.store.batch_remove([self.config.prefix + key.text], True)
        self.poke(key, b"other")
