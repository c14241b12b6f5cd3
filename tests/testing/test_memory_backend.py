"""The executable specification obeys every law, in real and in simulated time."""

from __future__ import annotations

from lmcache_core.memory.backend import MemoryBackend, MemoryConfig, _Value
from lmcache_core.spi import AbstractBackend, ByteSize, Capabilities, Key
from lmcache_core.testing.backend import BackendTests
from lmcache_core.testing.contexts import simulated_context, test_context


class TestMemory(BackendTests):
    """With every hook: the store is the instance's dictionary."""

    store: MemoryBackend

    def make_backend(self) -> AbstractBackend:
        self.store = MemoryBackend(MemoryBackend.testing_config(), test_context())
        return self.store

    def make_small_backend(self, nbytes: int) -> AbstractBackend:
        return MemoryBackend(MemoryConfig(ByteSize(nbytes)), test_context())

    def peek(self, key: Key) -> bytes | None:
        value = self.store._values.get(key)
        return value and value.content

    def poke(self, key: Key, value: bytes) -> None:
        self.store._values[key] = _Value(value, "poked", None)

    def damage(self, key: Key) -> None:
        self.poke(key, b"damaged")


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
