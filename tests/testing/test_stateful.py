"""The state machine: the specification agrees with itself, and wrong backends are told apart from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lmcache_core.memory.backend import MemoryBackend
from lmcache_core.spi import AbstractBackend, Key, Load, Loaded, Store, Stored
from lmcache_core.testing.contexts import simulated_context, test_context
from lmcache_core.testing.stateful import StatefulBackendTests


class TestSpecification(StatefulBackendTests):
    simulated = True

    def make_backend(self) -> AbstractBackend:
        return MemoryBackend(MemoryBackend.testing_config(), simulated_context())


class TestSpecificationInRealTime(StatefulBackendTests):
    examples = 5
    settle_s = 0.001

    def make_backend(self) -> AbstractBackend:
        return MemoryBackend(MemoryBackend.testing_config(), test_context())


class ForgetsTheThirdValue(MemoryBackend):
    def _store(self, store: Store) -> Stored:
        result = super()._store(store)
        if len(self._values) == 3:
            self._forget(store.key)
        return result


class MixesTwoKeys(MemoryBackend):
    def _load(self, load: Load) -> Loaded:
        first = min(self._values, default=load.key)
        return super()._load(replace(load, key=first) if len(self._values) > 2 else load)


class CountsDeletesTwice(MemoryBackend):
    async def delete(self, keys: Sequence[Key], /) -> int:
        there = sum(key in self._values for key in keys)
        await super().delete(keys)
        return there


@pytest.mark.parametrize("mutant", [ForgetsTheThirdValue, MixesTwoKeys, CountsDeletesTwice])
def test_wrong_backend_is_told_from_the_specification(mutant: Any) -> None:
    class Tests(StatefulBackendTests):
        simulated = True
        shrink = False

        def make_backend(self) -> AbstractBackend:
            return mutant(mutant.testing_config(), simulated_context())  # type: ignore[no-any-return]

    with pytest.raises(AssertionError):
        Tests().test_no_history_tells_it_from_the_specification()
