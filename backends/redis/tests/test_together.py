"""Several caches over one Redis."""

import pytest

from lmcache_core.testing.sharing import SharedStoreTests


class Store:
    def __init__(self, server):
        self.options = {"url": server.url}
        self.suspend, self.resume = server.suspend, server.resume
        self._command = server.command

    def spoil(self, key, content):
        name = f"lmcache:{key.text}"
        assert self._command("UNLINK", name) == b":1\r\n"
        if content:
            self._command("SET", name, content)
        else:
            self._command("LPUSH", name, "no string")


class TestTogether(SharedStoreTests):
    plugin = "redis"

    @pytest.fixture
    def store(self, serve):
        return Store(serve())
