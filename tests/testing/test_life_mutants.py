"""The kit itself is tested: small wrong backends against the laws B8-B16; each is killed by its law alone."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lmcache_core.memory.backend import MemoryBackend
from lmcache_core.spi import (
    PRESENT,
    STORED,
    Key,
    Load,
    Loaded,
    Store,
    Stored,
    StoreStatus,
    Unavailable,
)
from lmcache_core.testing.harness import BACKEND_LAWS
from lmcache_core.testing.laws import Outcome, broken_laws, run_laws
from tests.testing.mutants import LawsFor, Mutant, Mutants, assert_killed_by_alone

MUTANTS = Mutants()
breaks = MUTANTS.breaks


@breaks("B8")
class AcknowledgesEarly(MemoryBackend):
    def _store(self, store: Store) -> Stored:
        result = super()._store(store)
        if result is STORED:
            value = self._values.pop(store.key)
            loop = asyncio.get_running_loop()
            loop.call_later(0.0007, self._values.setdefault, store.key, value)
        return result


@breaks("B9")
class DeleteRaises(MemoryBackend):
    async def delete(self, keys: Sequence[Key], /) -> int:
        self._check("delete")
        if not all(key in self._values for key in keys):
            raise Unavailable("no such key")
        return await super().delete(keys)


@breaks("B9")
class DeleteCountsWhatWasAsked(MemoryBackend):
    async def delete(self, keys: Sequence[Key], /) -> int:
        await super().delete(keys)
        return len(keys)


@breaks("B10")
class WorksAfterClose(MemoryBackend):
    def _check(self, operation: str, batch: Sequence[Any] = ()) -> None:
        self.screen_batch(operation, batch)


@breaks("B10")
class FailsOnTheSecondClose(MemoryBackend):
    async def aclose(self) -> None:
        if self._closed:
            raise Unavailable("closed already")
        await super().aclose()


@breaks("B10")
class ClosesUnderItsLoads(MemoryBackend):
    async def load(self, batch: Sequence[Load], /, **options: Any) -> Sequence[Loaded]:
        results = await super().load(batch, **options)
        await asyncio.sleep(0.0007)
        for load in batch if self._closed else ():
            load.into[0][:1] = b"x"
        return results


@breaks("B11")
class KeepsTheBatchOnItself(MemoryBackend):
    async def load(self, batch: Sequence[Load], /, **options: Any) -> Sequence[Loaded]:
        self.batch = batch
        await asyncio.sleep(0)
        batch, self.batch = self.batch, ()
        return await super().load(batch, **options)


@breaks("B12")
class UndeclaredVerbHalfWorks(MemoryBackend):
    capabilities = replace(MemoryBackend.capabilities, scan=False)


@breaks("B12")
class HonoursAnUndeclaredOption(MemoryBackend):
    capabilities = replace(MemoryBackend.capabilities, ttl=False)

    def screen_store(self, store: Store, /) -> Stored | None:
        return None


@breaks("B12")
class ClaimsWhatItCannot(MemoryBackend):
    capabilities = replace(MemoryBackend.capabilities, remote_lease=True)


@breaks("B12")
class ForgetsTheTimeToLive(MemoryBackend):
    def _store(self, store: Store) -> Stored:
        return super()._store(replace(store, ttl=None))


@breaks("B13")
class DrawsFromTheGlobalRandom(MemoryBackend):
    def _store(self, store: Store) -> Stored:
        random.random()
        return super()._store(store)


@breaks("B13")
class StartsAThreadOfItsOwn(MemoryBackend):
    async def open(self) -> None:
        self.ended = threading.Event()
        threading.Thread(target=self.ended.wait, args=(5,), name="mine", daemon=True).start()

    async def aclose(self) -> None:
        getattr(self, "ended", threading.Event()).set()
        await super().aclose()


@breaks("B14")
class RaisesARefusal(MemoryBackend):
    def _store(self, store: Store) -> Stored:
        result = super()._store(store)
        if result.status is StoreStatus.REFUSED:
            raise Unavailable(result.reason)
        return result


@breaks("B14")
class RefusesWithoutAReason(MemoryBackend):
    def _store(self, store: Store) -> Stored:
        return replace(super()._store(store), reason="")


@breaks("B15")
class RefusesRepair(MemoryBackend):
    async def delete(self, keys: Sequence[Key], /) -> int:
        self.gone = {*keys, *getattr(self, "gone", ())}
        return await super().delete(keys)

    def _store(self, store: Store) -> Stored:
        return PRESENT if store.key in getattr(self, "gone", ()) else super()._store(store)


@breaks("B16")
class TellsTwice(MemoryBackend):
    async def load(self, batch: Sequence[Load], /, **options: Any) -> Sequence[Loaded]:
        results = await super().load(batch, **options)
        for index, result in enumerate(results if options.get("done") else ()):
            options["done"](index, result)
        return results


@breaks("B16")
class NeverTells(MemoryBackend):
    async def store(self, batch: Sequence[Store], /, **options: Any) -> Sequence[Stored]:
        return await super().store(batch)


@breaks("B16")
class TellsTooLate(MemoryBackend):
    async def store(
        self, batch: Sequence[Store], /, *, done: Any = None, **_: Any
    ) -> Sequence[Stored]:
        results = await super().store(batch)
        for index, result in enumerate(results if done else ()):
            asyncio.get_running_loop().call_soon(done, index, result)
        return results


@MUTANTS.each()
def test_mutant_is_killed_by_its_law_alone(law: str, mutant: Mutant, laws_for: LawsFor) -> None:
    assert_killed_by_alone(law, mutant, laws_for)


def test_every_other_law_has_a_mutant() -> None:
    assert set(MUTANTS) == set(BACKEND_LAWS) - {f"B{number}" for number in range(1, 8)}


def test_specification_passes_every_law_and_skips_none_whole(laws_for: LawsFor) -> None:
    verdicts = run_laws(laws_for(MemoryBackend))
    assert not broken_laws(verdicts), verdicts
    passed = {verdict.law for verdict in verdicts if verdict.outcome is Outcome.PASSED}
    assert passed == set(BACKEND_LAWS)


def test_failure_quotes_the_law(laws_for: LawsFor) -> None:
    tests = laws_for(DeleteCountsWhatWasAsked)()
    with pytest.raises(AssertionError) as caught:
        tests.test_delete_is_idempotent_and_counts_what_was_there()
    assert caught.value.__notes__ == [f"law B9 {BACKEND_LAWS['B9']}"]
