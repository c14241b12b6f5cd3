"""The backend keeps the laws. (B14 for a full store: a full pool evicts, see `test_cpu.py`.)"""

import pytest
from lmcache_backend_cpu import CPUBackend
from lmcache_backend_cpu.config import CPUConfig

from lmcache_core import ops
from lmcache_core.memory.arena import Arena
from lmcache_core.memory.leases import Held
from lmcache_core.memory.pool import Pool
from lmcache_core.policies.lru import LRU, LRUConfig
from lmcache_core.testing.backend import BackendTests
from lmcache_core.testing.contexts import test_context as real_context


class TestCPU(BackendTests):
    @pytest.fixture(autouse=True)
    def _pools(self):
        self.pools = []
        yield
        for pool in self.pools:
            pool.check()
            stock = pool.accounting()
            assert (stock.leased, stock.reserved, stock.quarantined) == (0, 0, 0)
            pool.close()

    def make_backend(self):
        return self.made(64 << 20)

    def made(self, nbytes):
        def create_pool(options):
            self.pools.append(Pool(Arena(nbytes, options), LRU(LRUConfig(), nbytes)))
            return self.pools[-1]

        return CPUBackend(CPUConfig(populate=False), real_context(create_pool=create_pool))

    def peek(self, key):
        leases = self.pools[-1].lease([key], "peek")
        value = None if leases[0] is None else leases[0].view.tobytes()
        self.pools[-1].release(leases)
        return value

    def poke(self, key, value):
        (held,) = self.pools[-1].reserve([(key, len(value))], "poke")
        assert isinstance(held, Held)
        held.view[:] = value
        assert self.pools[-1].commit(held, ops.digest(value, 0))
