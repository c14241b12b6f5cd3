"""The kit itself is tested: small wrong backends against the laws B1-B7; each is killed by its law alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lmcache_core.memory.backend import MemoryBackend
from lmcache_core.spi import (
    MISSED,
    PRESENT,
    BufferTooSmall,
    Found,
    Key,
    Load,
    Loaded,
    Store,
    Stored,
)
from tests.testing.mutants import LawsFor, Mutant, Mutants, assert_killed_by_alone

MUTANTS = Mutants()
breaks = MUTANTS.breaks


@breaks("B1")
class Reorders(MemoryBackend):
    async def load(self, batch: Sequence[Load], /, **options: Any) -> Sequence[Loaded]:
        return [*await super().load(batch, **options)][::-1]


@breaks("B1")
class AnswersNothingWithNone(MemoryBackend):
    async def lookup(self, keys: Sequence[Key], /, **options: Any) -> Sequence[Found | None]:
        return await super().lookup(keys, **options) or [None]


@breaks("B2")
class DropsMisses(MemoryBackend):
    async def lookup(self, keys: Sequence[Key], /, **options: Any) -> Sequence[Found | None]:
        return [found for found in await super().lookup(keys, **options) if found] or keys[:0]  # type: ignore[return-value]


@breaks("B2")
class RaisesOnAMiss(MemoryBackend):
    def _load(self, load: Load) -> Loaded:
        self._values[load.key]
        return super()._load(load)


@breaks("B2")
class TreatsEmptyAsAbsent(MemoryBackend):
    def _found(self, key: Key) -> Found | None:
        found = super()._found(key)
        return found if found and found.nbytes else None


@breaks("B2")
class LogsMisses(MemoryBackend):
    def _load(self, load: Load) -> Loaded:
        result = super()._load(load)
        if result is MISSED:
            logging.getLogger("mutant").warning("miss: %r", load.key)
        return result


@breaks("B3")
class RaisesTheFaultOfOneItem(MemoryBackend):
    async def load(self, batch: Sequence[Load], /, **options: Any) -> Sequence[Loaded]:
        results = await super().load(batch, **options)
        for result in results:
            if result.error:
                raise result.error
        return results


@breaks("B4")
class KeepsAView(MemoryBackend):
    def _store(self, store: Store) -> Stored:
        self.kept = store.parts
        return super()._store(store)


@breaks("B4")
class KeepsABuffer(MemoryBackend):
    def _load(self, load: Load) -> Loaded:
        self.kept = load
        return super()._load(load)


@breaks("B5")
class LeavesWhileSomebodyStillWrites(MemoryBackend):
    async def load(self, batch: Sequence[Load], /, **options: Any) -> Sequence[Loaded]:
        try:
            await asyncio.sleep(0.0007)
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(0.001, list, map(self._load, batch))
            raise
        return await super().load(batch, **options)


@breaks("B5")
class LeavesWhileSomebodyStillReads(MemoryBackend):
    async def store(self, batch: Sequence[Store], /, **options: Any) -> Sequence[Stored]:
        try:
            await asyncio.sleep(0.0007)
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(0.001, list, map(self._store, batch))
            raise
        return await super().store(batch, **options)


@breaks("B6")
class ShowsPartsOfValues(MemoryBackend):
    async def store(self, batch: Sequence[Store], /, **options: Any) -> Sequence[Stored]:
        fresh = [store for store in batch if self._value(store.key) is None]
        for store in fresh:
            self._store(replace(store, parts=(store.parts[0][: store.nbytes // 2],)))
        await asyncio.sleep(0)
        for store in fresh:
            self._forget(store.key)
        return await super().store(batch, **options)


@breaks("B6")
class OverwritesAPresentKey(MemoryBackend):
    def _store(self, store: Store) -> Stored:
        present = self._forget(store.key)
        result = super()._store(store)
        return PRESENT if present else result


@breaks("B7")
class TruncatesAtOneMebibyte(MemoryBackend):
    def _load(self, load: Load) -> Loaded:
        result = super()._load(load)
        return Loaded.filled(min(result.nbytes, 1 << 20)) if result.nbytes else result


@breaks("B7")
class ScribblesPastTheEnd(MemoryBackend):
    def _load(self, load: Load) -> Loaded:
        result = super()._load(load)
        if load.into and result.nbytes < load.into[0].nbytes:
            load.into[0][result.nbytes] ^= bool(result.nbytes)
        return result


@breaks("B7")
class IgnoresTheOffset(MemoryBackend):
    def _load(self, load: Load) -> Loaded:
        return super()._load(replace(load, offset=0))


@breaks("B7")
class FillsShortBuffers(MemoryBackend):
    def _load(self, load: Load) -> Loaded:
        result = super()._load(load)
        if isinstance(result.error, BufferTooSmall):
            load.into[0][:] = bytes(load.into[0].nbytes)
        return result


@MUTANTS.each()
def test_mutant_is_killed_by_its_law_alone(law: str, mutant: Mutant, laws_for: LawsFor) -> None:
    assert_killed_by_alone(law, mutant, laws_for)


def test_every_data_law_has_a_mutant() -> None:
    assert set(MUTANTS) == {f"B{number}" for number in range(1, 8)}
