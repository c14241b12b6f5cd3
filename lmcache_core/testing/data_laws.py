"""Laws B1-B7: what verbs answer, and what they do to memory."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any
from unittest import SkipTest

from lmcache_core.spi import (
    AbstractBackend,
    BackendError,
    BufferTooSmall,
    Corrupt,
    Load,
    Loaded,
    LoadStatus,
    Store,
    StoreStatus,
)
from lmcache_core.testing.harness import POISON, BackendHarness, backend_law, poisoned


class DataLaws(BackendHarness):
    """What verbs answer, and what they do to memory."""

    @backend_law("B1")
    async def test_results_have_the_length_and_order_of_the_request(
        self, store: AbstractBackend
    ) -> None:
        values = [await self.put(store, number, 10 * number + 5) for number in range(4)]
        keys = [self.key(number) for number in range(4)]
        found = await store.lookup(keys)
        assert [one and one.nbytes for one in found] == [len(value) for value in values]
        buffers = [bytearray(len(value)) for value in values]
        loaded = await store.load(
            [Load(key, (memoryview(buffer),)) for key, buffer in zip(keys, buffers, strict=True)]
        )
        assert [one.nbytes for one in loaded] == [len(value) for value in values]
        batch = [Store(self.key(number), (memoryview(b"x"),)) for number in (0, 10, 11)]
        stored = [one.status for one in await store.store(batch)]
        assert stored == [StoreStatus.PRESENT, StoreStatus.STORED, StoreStatus.STORED]

    @backend_law("B1")
    async def test_empty_request_has_an_empty_answer(self, store: AbstractBackend) -> None:
        assert list(await store.lookup([])) == []
        assert list(await store.load([])) == []
        assert list(await store.store([])) == []
        assert await store.delete([]) == 0

    @backend_law("B2")
    async def test_absent_is_a_value_and_not_logged(self, store: AbstractBackend) -> None:
        seen: list[logging.LogRecord] = []
        handler = logging.Handler(logging.INFO)
        setattr(handler, "emit", seen.append)  # noqa: B010  # a class for one method says less
        logging.getLogger().addHandler(handler)
        try:
            buffer = bytearray([POISON]) * 64
            keys = [self.key(0), self.key(1)]
            assert list(await store.lookup(keys)) == [None, None]
            loaded = await store.load([Load(key, (memoryview(buffer),)) for key in keys])
            assert [one.status for one in loaded] == [LoadStatus.MISSED] * 2
            assert buffer == bytes([POISON]) * 64, "a miss touched the buffer"
        finally:
            logging.getLogger().removeHandler(handler)
        assert not seen, f"logged: {seen[0].getMessage()}"

    @backend_law("B2")
    async def test_empty_value_is_not_absent(self, store: AbstractBackend) -> None:
        """Seen in LMCache#497."""
        (stored,) = await store.store([Store(self.key(0), (memoryview(b""),))])
        if stored.status is StoreStatus.REFUSED:
            raise SkipTest(f"refuses empty values: {stored.reason}")
        assert stored.status is StoreStatus.STORED
        await self.appear(store, 0)
        (found,) = await store.lookup([self.key(0)])
        assert found is not None
        assert found.nbytes == 0
        (loaded,) = await store.load([Load(self.key(0), (memoryview(bytearray(8)),))])
        assert loaded == Loaded.filled(0)

    @backend_law("B2")
    async def test_value_written_by_others_is_found(self, store: AbstractBackend) -> None:
        self.poke(self.key(0), self.value(0))
        assert await self.get(store, 0) == self.value(0)

    @backend_law("B3")
    async def test_fault_of_one_item_is_its_own_result(self, store: AbstractBackend) -> None:
        """Seen in dynamo#15079."""
        for number in range(3):
            await self.put(store, number)
        buffers = [memoryview(bytearray(room)) for room in (999, 10, 999)]
        loads = [Load(self.key(number), (buffer,)) for number, buffer in enumerate(buffers)]
        loaded = await store.load(loads)
        expected = [LoadStatus.FILLED, LoadStatus.FAILED, LoadStatus.FILLED]
        assert [one.status for one in loaded] == expected
        assert isinstance(loaded[1].error, BackendError)

    @backend_law("B4")
    async def test_no_view_is_kept(self, store: AbstractBackend) -> None:
        value = await self.put(store, 0)
        for room in (len(value), len(value) - 1):
            buffer = bytearray(room)
            await self.load_into(store, Load(self.key(0), (memoryview(buffer),)))
            self._can_grow(buffer, "load")
        buffer = bytearray(64)
        await self.load_into(store, Load(self.key(1), (memoryview(buffer),)))
        self._can_grow(buffer, "a load that missed")
        source = bytearray(self.value(2))
        await store.store([Store(self.key(2), (memoryview(source),))])
        self._can_grow(source, "store")
        await store.store([Store(self.key(2), (memoryview(source),))])
        self._can_grow(source, "a store of a present key")

    @staticmethod
    def _can_grow(buffer: bytearray, verb: str) -> None:
        for attempt in range(2):
            try:
                buffer.append(0)  # Python refuses to resize what a view still looks at
                return
            except BufferError:
                if attempt == 0:
                    gc.collect()  # a reference cycle around an exception is no harm
        raise AssertionError(f"a view was kept after {verb}")

    @backend_law("B5")
    async def test_cancelled_load_touches_memory_no_more(self, store: AbstractBackend) -> None:
        nbytes = self.sizes(store, 64 << 10, 999)[0]
        await self.put(store, 0, nbytes)
        buffers = []
        for wait in [*self.moments(), self.settle]:
            buffer = bytearray(nbytes)
            task = asyncio.ensure_future(store.load([Load(self.key(0), (memoryview(buffer),))]))
            await wait()
            await self._cancel(store, task)
            buffer[:] = bytes([POISON]) * nbytes
            buffers.append(buffer)
        await self.settle()
        for buffer in buffers:
            assert buffer.count(POISON) == nbytes, "a buffer was written after its load had ended"

    @backend_law("B5")
    async def test_cancelled_store_reads_memory_no_more(self, store: AbstractBackend) -> None:
        nbytes = self.sizes(store, 64 << 10, 999)[0]
        waits = [*self.moments(), self.settle]
        for number, wait in enumerate(waits):
            source = bytearray(self.value(number, nbytes))
            task = self.storing(store, number, source)
            await wait()
            await self._cancel(store, task)
            source[:] = bytes([POISON]) * nbytes
        await self.settle()
        for number in range(len(waits)):
            stored = await self.get(store, number)
            assert POISON not in (stored or b""), "memory was read after its store had ended"

    @staticmethod
    async def _cancel(store: AbstractBackend, task: asyncio.Future[Any]) -> None:
        began = asyncio.get_running_loop().time()
        task.cancel()
        await asyncio.wait([task])
        took, bound = asyncio.get_running_loop().time() - began, store.capabilities.quiescence_s
        assert took <= bound + 1.0, f"ended {took:.3f} s after cancellation, declared {bound} s"
        if not task.cancelled():
            task.exception()

    @backend_law("B6")
    async def test_value_is_never_seen_half_written(self, store: AbstractBackend) -> None:
        """Seen in LMCache#4991."""
        nbytes = self.sizes(store, (256 << 10) + 1, 999)[0]
        value = self.value(0, nbytes)
        task = self.storing(store, 0, value)
        for _ in range(1000):
            seen = await self.get(store, 0)
            assert seen is None or seen == value, "a part of a value was visible"
            if task.done():
                break
            await asyncio.sleep(0)
        await task

    @backend_law("B6")
    async def test_cancelled_store_leaves_the_whole_value_or_nothing(
        self, store: AbstractBackend
    ) -> None:
        nbytes = self.sizes(store, 64 << 10, 999)[0]
        for number, wait in enumerate(self.moments()):
            value = self.value(number, nbytes)
            task = self.storing(store, number, value)
            await wait()
            task.cancel()
            await asyncio.wait([task])
            assert await self.get(store, number) in (None, value), "a part of a value was left"

    @backend_law("B6")
    async def test_present_key_keeps_its_bytes(self, store: AbstractBackend) -> None:
        value = await self.put(store, 0)
        stored = await self.store_one(store, 0, self.value(1))
        assert stored.status is StoreStatus.PRESENT
        assert await self.get(store, 0) == value

    @backend_law("B6")
    async def test_value_is_whole_or_absent_after_a_crash(self, store: AbstractBackend) -> None:
        for number, wait in enumerate(self.moments()):
            value = self.value(number, 5000)
            task = self.storing(store, number, value)
            await wait()
            found = self.crash(store)
            if found is None:
                await asyncio.wait([task])
                raise SkipTest("no crash hook")
            async with self.opened(found) as survivor:
                assert await self.get(survivor, number) in (None, value)
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()

    @backend_law("B7")
    async def test_load_writes_exactly_the_value(self, store: AbstractBackend) -> None:
        """Seen in LMCache/LMCache-Ascend#270."""
        for number, nbytes in enumerate(self.sizes(store, 1, 255, 4096, 65537, (1 << 20) + 17)):
            value = await self.put(store, number, nbytes)
            buffer = bytearray([POISON]) * (nbytes + 64)
            loaded = await self.load_into(store, Load(self.key(number), (memoryview(buffer),)))
            assert loaded == Loaded.filled(nbytes)
            assert buffer[:nbytes] == value, f"other bytes than stored ({nbytes})"
            assert buffer[nbytes:] == bytes([POISON]) * 64, "wrote past the end of the value"

    @backend_law("B7")
    async def test_short_buffer_is_reported_and_left_alone(self, store: AbstractBackend) -> None:
        value = await self.put(store, 0)
        for room in (0, 1, len(value) - 1):
            await self._untouched(store, Load(self.key(0), poisoned(room)), BufferTooSmall)

    @backend_law("B7", needs="ranges")
    async def test_part_of_a_value_is_loaded(self, store: AbstractBackend) -> None:
        value = await self.put(store, 0)
        for offset, length in ((0, 10), (7, 100), (998, 1), (500, None), (999, None), (3, 0)):
            part = value[offset:] if length is None else value[offset : offset + length]
            buffer = bytearray([POISON]) * 1100
            load = Load(self.key(0), (memoryview(buffer),), offset, length)
            assert await self.load_into(store, load) == Loaded.filled(len(part))
            assert buffer == part + bytes([POISON]) * (1100 - len(part)), (offset, length)

    @backend_law("B7", needs="ranges")
    async def test_part_past_the_end_is_corrupt(self, store: AbstractBackend) -> None:
        await self.put(store, 0)
        for offset, length in ((990, 10), (1000, None), (5000, 1), (0, 1000)):
            load = Load(self.key(0), poisoned(2000), offset, length)
            await self._untouched(store, load, Corrupt)
        await self._untouched(store, Load(self.key(0), poisoned(9), 5, 10), BufferTooSmall)

    async def _untouched(
        self, store: AbstractBackend, load: Load, error: type[BackendError]
    ) -> None:
        loaded = await self.load_into(store, load)
        assert loaded.status is LoadStatus.FAILED
        assert isinstance(loaded.error, error), f"reported as {loaded.error!r}"
        assert load.into[0].tobytes().count(POISON) == load.room, "the buffer was touched"

    @backend_law("B7")
    async def test_buffers_are_joined_and_filled_in_order(self, store: AbstractBackend) -> None:
        if store.capabilities.iov_max < 3:
            raise SkipTest("declares iov_max below 3")
        value = self.value(0)
        parts = (memoryview(value)[:64], memoryview(b""), memoryview(value)[64:])
        await store.store([Store(self.key(0), parts)])
        await self.appear(store, 0)
        buffer = bytearray([POISON]) * 1064
        into = (memoryview(buffer)[:1], memoryview(buffer)[1:500], memoryview(buffer)[500:])
        assert await self.load_into(store, Load(self.key(0), into)) == Loaded.filled(999)
        assert buffer == value + bytes([POISON]) * 65
