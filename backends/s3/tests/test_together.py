"""Several caches over one bucket."""

import pytest
from lmcache_backend_s3.transport import Call

from lmcache_core.testing.sharing import SharedStoreTests


class Store:
    def __init__(self, server):
        config, self._bucket = server.config(), server.bucket()
        self.options = {"url": config.url, "endpoint": config.endpoint, "region": config.region}
        self.options |= {
            "access_key": config.access_key.reveal(),
            "secret_key": config.secret_key.reveal(),
        }
        self.suspend, self.resume = server.suspend, server.resume

    def spoil(self, key, content):
        name = f"{key.digest.hex()[:3]}/{key.text}"
        assert self._bucket.head(name, Call()) is not None
        self._bucket.put(name, [memoryview(content)], Call(), only_new=False)


class TestTogether(SharedStoreTests):
    plugin = "s3"

    @pytest.fixture
    def store(self, serve):
        return Store(serve())
