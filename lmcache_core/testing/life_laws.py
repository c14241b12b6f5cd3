"""Laws B8-B11 and B13-B16: acknowledgement, removal, end, overlap, manners, refusal, repair, completion."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import SkipTest

from lmcache_core.spi import (
    AbstractBackend,
    Closed,
    Durability,
    Load,
    Loaded,
    Store,
    Stored,
    StoreStatus,
)
from lmcache_core.testing.harness import POISON, BackendHarness, backend_law, poisoned


class LifeLaws(BackendHarness):
    """Acknowledgement, removal, end, overlap, manners."""

    @backend_law("B8")
    async def test_acknowledged_value_is_there(self, store: AbstractBackend) -> None:
        stored = await self.store_one(store, 0, self.value(0))
        assert stored.status is StoreStatus.STORED
        found = await self.find(store, 0)
        assert found is not None, "not found right after it was acknowledged"
        assert found.nbytes == 999

    @backend_law("B8")
    async def test_acknowledged_value_is_seen_by_another_reader(
        self, store: AbstractBackend
    ) -> None:
        self.peek(self.key(1))
        await self.store_one(store, 0, self.value(0))
        assert self.peek(self.key(0)) == self.value(0)

    @backend_law("B8")
    async def test_acknowledged_value_survives_what_durability_names(
        self, store: AbstractBackend
    ) -> None:
        """Seen in Mooncake#607."""
        if store.capabilities.durability is Durability.NONE:
            raise SkipTest("declares no durability")
        await self.store_one(store, 0, self.value(0))
        found = self.crash(store)
        if found is None:
            raise SkipTest("no crash hook")
        async with self.opened(found) as survivor:
            assert await self.get(survivor, 0) == self.value(0)

    @backend_law("B9")
    async def test_delete_is_idempotent_and_counts_what_was_there(
        self, store: AbstractBackend
    ) -> None:
        for number in range(3):
            await self.put(store, number)
        keys = [self.key(number) for number in range(4)]
        assert await store.delete(keys[:1]) == 1
        assert await store.delete(keys[:1]) == 0
        assert await self.find(store, 0) is None, "still there after it was deleted"
        assert await store.delete([keys[1], keys[3], keys[1]]) == 1
        assert await store.delete(keys) == 1
        assert await store.delete(keys) == 0

    @backend_law("B10")
    async def test_closed_backend_refuses_every_verb(self, store: AbstractBackend) -> None:
        await self.put(store, 0)
        await store.aclose()
        await store.aclose()
        key, can = self.key(0), store.capabilities
        calls = {
            "lookup": store.lookup([key]),
            "load": store.load([Load(key, poisoned(999))]),
            "store": store.store([Store(self.key(1), (memoryview(b"x"),))]),
            "delete": store.delete([key]),
        }
        calls |= {"scan": store.scan()} if can.scan else {}
        calls |= {"usage": store.usage()} if can.usage else {}
        calls |= {"lookup_prefix": store.lookup_prefix([key])} if can.prefix_lookup else {}
        results = await asyncio.gather(*calls.values(), return_exceptions=True)
        for verb, result in zip(calls, results, strict=True):
            assert isinstance(result, Closed), f"{verb} after close gave {result!r}"

    @backend_law("B10")
    async def test_backend_that_was_never_opened_can_be_closed(
        self, store: AbstractBackend
    ) -> None:
        unopened = self.make_backend()
        await unopened.aclose()
        await unopened.aclose()

    @backend_law("B10")
    async def test_close_waits_for_borrowed_memory(self, store: AbstractBackend) -> None:
        nbytes = self.sizes(store, 64 << 10, 999)[0]
        await self.put(store, 0, nbytes)
        buffers = [bytearray(nbytes) for _ in range(8)]
        tasks = [
            asyncio.ensure_future(store.load([Load(self.key(0), (memoryview(buffer),))]))
            for buffer in buffers
        ]
        await asyncio.sleep(0)
        await asyncio.gather(store.aclose(), store.aclose())
        for buffer in buffers:
            buffer[:] = bytes([POISON]) * nbytes
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.settle()
        for buffer in buffers:
            assert buffer.count(POISON) == nbytes, "a buffer was written after close"

    @backend_law("B10")
    async def test_cancelled_close_closes_all_the_same(self, store: AbstractBackend) -> None:
        await self.put(store, 0)
        load = asyncio.ensure_future(store.load([Load(self.key(0), poisoned(999))]))
        await asyncio.sleep(0)
        task = asyncio.ensure_future(store.aclose())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, load, return_exceptions=True)
        await store.aclose()
        (result,) = await asyncio.gather(store.lookup([self.key(0)]), return_exceptions=True)
        assert isinstance(result, Closed), f"lookup after close gave {result!r}"

    @backend_law("B11")
    async def test_verbs_may_overlap(self, store: AbstractBackend) -> None:
        async def lane(number: int) -> None:
            value = await self.put(store, number, 2000 + number)
            for _ in range(3):
                assert await self.get(store, number) == value, "another value than its own"
            assert await store.delete([self.key(number)]) == 1

        async with asyncio.TaskGroup() as group:
            for number in range(12):
                group.create_task(lane(number))

    @backend_law("B11")
    async def test_stores_of_one_key_may_overlap(self, store: AbstractBackend) -> None:
        results = await asyncio.gather(*(self.store_one(store, 0, self.value(0)) for _ in range(6)))
        statuses = {result.status for result in results}
        assert StoreStatus.STORED in statuses
        assert StoreStatus.FAILED not in statuses, "one of two stores of a key failed"

    @backend_law("B13")
    async def test_nothing_global_is_touched(self, store: AbstractBackend) -> None:
        def world() -> dict[str, Any]:
            return {
                "random state": random.getstate(),
                "environment": dict(os.environ),
                "working folder": os.getcwd(),
                "root log handlers": list(logging.getLogger().handlers),
            }

        context = getattr(store, "context", None)
        owner = getattr(getattr(context, "executor", None), "owner", "lmcache-")
        allowed = (owner, "asyncio", *self.own_threads)
        await store.aclose()  # a store may belong to one instance at a time
        before, running = world(), set(threading.enumerate())
        other = self.make_backend()
        async with self.opened(other):
            await self.put(other, 0)
            await self.get(other, 0)
            await other.delete([self.key(0)])
            started = set(threading.enumerate()) - running
            foreign = sorted(one.name for one in started if not one.name.startswith(allowed))
        assert not foreign, f"threads not of the context's executor: {foreign}"
        changed = [name for name, value in world().items() if value != before[name]]
        assert not changed, f"changed: {', '.join(changed)}"

    @backend_law("B14")
    async def test_too_large_is_refused(self, store: AbstractBackend) -> None:
        limit = store.capabilities.max_value
        if limit is None or limit > 64 << 20:
            raise SkipTest("declares no max_value below 64 MiB")
        (stored,) = await store.store([Store(self.key(0), (memoryview(bytes(limit + 1)),))])
        assert stored.status is StoreStatus.REFUSED
        assert stored.reason, "refused without a reason"
        assert await self.find(store, 0) is None

    @backend_law("B14")
    async def test_full_store_refuses(self, store: AbstractBackend) -> None:
        small = self.make_small_backend(1 << 20)
        if small is None:
            raise SkipTest("no make_small_backend hook")
        async with self.opened(small):
            for number in range(32):
                value = memoryview(self.value(number, 1 << 17))
                (stored,) = await small.store([Store(self.key(number), (value,))])
                if stored.status is not StoreStatus.STORED:
                    break
            assert stored.status is StoreStatus.REFUSED, f"a full store said {stored}"
            assert stored.reason, "refused without a reason"
            assert await self.find(small, number) is None, "refused, yet there"

    @backend_law("B15")
    async def test_deleted_value_can_be_stored_again(self, store: AbstractBackend) -> None:
        await self.put(store, 0)
        await store.delete([self.key(0)])
        value = await self.put(store, 0)
        assert await self.get(store, 0) == value

    @backend_law("B15")
    async def test_damaged_value_can_be_repaired(self, store: AbstractBackend) -> None:
        await self.put(store, 0)
        self.damage(self.key(0))
        await self.load_into(store, Load(self.key(0), poisoned(999)))
        await store.delete([self.key(0)])
        value = await self.put(store, 0)
        assert await self.get(store, 0) == value

    @backend_law("B16")
    async def test_done_is_called_once_per_item_from_the_loop(self, store: AbstractBackend) -> None:
        calls: list[tuple[int, Loaded | Stored, int]] = []

        def done(index: int, result: Loaded | Stored) -> None:
            calls.append((index, result, threading.get_ident()))

        stores = [Store(self.key(number), (memoryview(b"x" * 9),)) for number in range(5)]
        loads = [Load(store.key, poisoned(9)) for store in stores]
        for storing in (True, False):
            calls.clear()
            results: Sequence[Loaded | Stored] = await (
                store.store(stores, done=done) if storing else store.load(loads, done=done)
            )
            seen = list(calls)
            await self.settle()
            assert calls == seen, "done was called after the await had ended"
            assert sorted(index for index, _, _ in seen) == list(range(5)), "not once per item"
            assert {str(result) for _, result, _ in seen} == {str(result) for result in results}
            threads = {thread for _, _, thread in seen}
            assert threads == {threading.get_ident()}, "done was called on another thread"

    @backend_law("B16")
    async def test_done_is_never_called_after_a_cancelled_await(
        self, store: AbstractBackend
    ) -> None:
        for number, wait in enumerate(self.moments()):
            calls: list[tuple[int, Stored]] = []
            batch = [Store(self.key(number), (memoryview(self.value(number)),))]
            done = partial(_note, calls)
            task = asyncio.ensure_future(store.store(batch, done=done))
            await wait()
            task.cancel()
            await asyncio.wait([task])
            seen = list(calls)
            await asyncio.sleep(0.002)
            assert calls == seen, "done was called after the await had ended"
            assert len(calls) <= 1, "done was called twice"


def _note(calls: list[tuple[int, Stored]], index: int, result: Stored) -> None:
    calls.append((index, result))
