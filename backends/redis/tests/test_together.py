"""Several caches over one Redis."""

import pytest

from lmcache_core.testing.sharing import SharedStoreTests


class Store:
    def __init__(self, server, **options):
        self.options = {"url": server.url} | options
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


class TestDamageOfParts:
    """A value in Valkey that is in parts becomes one that is not, and that is damaged."""

    plugin = "valkey"
    settings, cache = SharedStoreTests.settings, SharedStoreTests.cache
    test_damage_is_a_miss_and_is_stored_anew = (
        SharedStoreTests.test_damage_is_a_miss_and_is_stored_anew
    )

    @pytest.fixture
    def store(self, serve):
        return Store(serve(name="valkey"), part_size="16KiB")
