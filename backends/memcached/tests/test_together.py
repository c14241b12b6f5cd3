"""Several caches over one server."""

import pytest
from lmcache_backend_memcached.serving import START, MemcachedServer

from lmcache_core.testing.services import find_program, need_service
from lmcache_core.testing.sharing import SharedStoreTests

pytestmark = pytest.mark.slow


class Store:
    def __init__(self, server):
        self.options = {"server": server.path}
        self.suspend, self.resume = server.suspend, server.resume
        self._server = server

    def spoil(self, key, content):
        line = b"set lmcache:%s 0 0 %d\r\n%s" % (key.text.encode(), len(content), content)
        assert self._server.command(line) == b"STORED\r\n"


class TestTogether(SharedStoreTests):
    plugin = "memcached"
    test_two_daemons_share_hits = None  # two caches show it, too

    @pytest.fixture
    def store(self, tmp_path):
        program = find_program("memcached")
        need_service("memcached", None if program else "no memcached here", start=START)
        with MemcachedServer(program, tmp_path) as server:
            yield Store(server)
