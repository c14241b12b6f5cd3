"""The laws on an object store, a real SeaweedFS."""

import pytest
from lmcache_backend_nixl import NixlBackend
from lmcache_backend_nixl.config import NixlConfig

from lmcache_core.testing.backend import BackendTests
from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.testing.stateful import StatefulBackendTests


class TestObjects(BackendTests, StatefulBackendTests):
    plugin = "nixl"
    examples, steps = 1, 12

    @pytest.fixture(autouse=True)
    def _weed(self, weed, objects):
        self.config = NixlConfig(**objects(weed))

    def make_backend(self):
        return NixlBackend(self.config, real_context())

    def reopen(self, store):
        return NixlBackend(store.config, real_context())

    crash = reopen
