"""Several caches over one segment, whose memory comes back while it hangs."""

import pytest
from lmcache_backend_mooncake.native import address, connect

from lmcache_core.testing.sharing import SharedStoreTests

pytestmark = pytest.mark.slow


class Store:
    def __init__(self, server):
        config = server.config()
        self.options = {"url": config.url, "admin": config.admin, "buffer": str(config.buffer)}
        self.suspend, self.resume = server.provider.suspend, server.provider.resume
        self._store, self._how = connect(config)
        self.close = self._store.close

    def spoil(self, key, content):
        name, view = f"lmcache:{key.text}", memoryview(content or b"\0")
        assert self._store.batch_remove([name], True) == [0]
        put = self._store.batch_put_from
        assert put([name], [address(view)], [view.nbytes], self._how) == [0]


class TestTogether(SharedStoreTests):
    plugin = "mooncake"

    @pytest.fixture
    def store(self, serve):
        store = Store(serve("--client_ttl=30"))  # what the master gives up is gone
        yield store
        store.close()
