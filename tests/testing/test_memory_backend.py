"""The executable specification obeys every law, in real and in simulated time."""

from __future__ import annotations

from lmcache_core.memory.backend import MemoryBackend
from lmcache_core.spi import AbstractBackend, Capabilities
from lmcache_core.testing.backend import BackendTests
from lmcache_core.testing.contexts import simulated_context, test_context
from tests.testing.conftest import MemoryTests


class TestMemory(MemoryTests):
    """In real time, with every hook."""


class TestSimulatedMemory(BackendTests):
    simulated = True

    def make_backend(self) -> AbstractBackend:
        return MemoryBackend(MemoryBackend.testing_config(), simulated_context())


class PlainMemory(MemoryBackend):
    """Claims nothing beyond the four verbs."""

    capabilities = Capabilities(max_value=1 << 21, max_batch=100)
    scan = AbstractBackend.scan
    usage = AbstractBackend.usage
    lookup_prefix = AbstractBackend.lookup_prefix
    delete_exact = AbstractBackend.delete_exact


class TestPlainMemory(BackendTests):
    def make_backend(self) -> AbstractBackend:
        return PlainMemory(MemoryBackend.testing_config(), test_context())
