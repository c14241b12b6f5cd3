"""Several caches over one table."""

import pytest
from lmcache_backend_bigtable import BigtableBackend
from lmcache_backend_bigtable.serving import PROGRAM, START, Emulator

from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.testing.services import find_program, need_service
from lmcache_core.testing.sharing import SharedStoreTests

pytestmark = pytest.mark.slow


class Store:
    def __init__(self, server):
        config = server.config()
        self.options = {"url": config.url, "emulator": config.emulator}
        self.suspend, self.resume = server.suspend, server.resume
        self._other = BigtableBackend(config, real_context())
        self._other.open_blocking()
        self.close = self._other.close_blocking

    def spoil(self, key, content):
        row = key.text.encode()
        assert self._other._delete(row)
        assert self._other._put(row, [memoryview(content)])


class TestTogether(SharedStoreTests):
    plugin = "bigtable"
    test_two_daemons_share_hits = None  # two caches show it, too

    @pytest.fixture
    def store(self, tmp_path):
        program = find_program(PROGRAM)
        need_service("bigtable", None if program else f"no {PROGRAM} here", start=START)
        folder = tmp_path / "bt"
        folder.mkdir()
        with Emulator(program, folder) as server:
            store = Store(server)
            yield store
            store.close()
