"""What tests of the kit share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lmcache_core.memory.backend import MemoryBackend, MemoryConfig, _Value
from lmcache_core.spi import AbstractBackend, ByteSize, Context, Key
from lmcache_core.testing.backend import BackendTests
from lmcache_core.testing.contexts import simulated_context, test_context


class MemoryTests(BackendTests):
    """Laws of a variant of the specification, with every hook: the store is the instance's dictionary."""

    backend = MemoryBackend
    store: MemoryBackend

    def context(self) -> Context:
        return test_context()

    def make_backend(self) -> AbstractBackend:
        self.store = self.backend(self.backend.testing_config(), self.context())
        return self.store

    def make_small_backend(self, nbytes: int) -> AbstractBackend:
        return self.backend(MemoryConfig(ByteSize(nbytes)), self.context())

    def peek(self, key: Key) -> bytes | None:
        value = self.store._values.get(key)
        return value and value.content

    def poke(self, key: Key, value: bytes) -> None:
        self.store._values[key] = _Value(value, "poked", None)

    def damage(self, key: Key) -> None:
        self.poke(key, b"damaged")


@pytest.fixture
def laws_for() -> Callable[[type[MemoryBackend]], type[BackendTests]]:
    """Make the law class of a variant of the specification, in simulated time, with every hook."""
    return _laws_for


def _laws_for(variant: type[MemoryBackend]) -> type[BackendTests]:
    class Tests(MemoryTests):
        simulated = True
        backend = variant

        def context(self) -> Context:
            return simulated_context()

    return Tests
