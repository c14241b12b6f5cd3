"""Law B12 in both directions: what is not declared is refused, what is declared works."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Awaitable
from unittest import SkipTest

from lmcache_core.spi import (
    AbstractBackend,
    Capabilities,
    Load,
    LoadStatus,
    MemoryKind,
    Region,
    Store,
    StoreStatus,
    Unsupported,
)
from lmcache_core.testing.harness import BackendHarness, backend_law, poisoned


class CapabilityLaws(BackendHarness):
    """Every capability has a test for those who declare it and one for those who do not."""

    @backend_law("B12")
    async def test_capabilities_are_sound_and_constant(self, store: AbstractBackend) -> None:
        can = store.capabilities
        assert isinstance(can, Capabilities)
        assert can.iov_max >= 1, "iov_max below 1"
        assert can.alignment >= 1, "alignment below 1"
        assert can.quiescence_s >= 0, "negative quiescence_s"
        assert can.memory, "no kind of memory"
        assert can.placement, "no placement"
        await self.put(store, 0)
        assert store.capabilities == can, "capabilities changed while open"

    @backend_law("B12")
    async def test_undeclared_verb_is_unsupported(self, store: AbstractBackend) -> None:
        """Seen in LMCache#1179, LMCache#1514."""
        can, key = store.capabilities, self.key(0)
        calls: dict[str, Awaitable[object]] = {
            "scan": store.scan(),
            "usage": store.usage(),
            "prefix_lookup": store.lookup_prefix([key]),
            "conditional_delete": store.delete_exact(key, "1"),
            "remote_lease": store.hold([key], 1.0),
            "register": store.register(Region(MemoryKind.HOST, 0, 0, 0)),
        }
        results = await asyncio.gather(*calls.values(), return_exceptions=True)
        for capability, result in zip(calls, results, strict=True):
            if not getattr(can, capability):
                assert isinstance(result, Unsupported), f"{capability} gave {result!r}"
        if not can.resident:
            try:
                pool = store.pool
            except Unsupported:
                return
            raise AssertionError(f"resident is not declared, yet there is {pool!r}")

    @backend_law("B12", lacks="ranges")
    async def test_part_of_a_value_is_unsupported(self, store: AbstractBackend) -> None:
        await self.put(store, 0)
        for offset, length in ((1, None), (0, 10)):
            loaded = await self.load_into(store, Load(self.key(0), poisoned(999), offset, length))
            assert isinstance(loaded.error, Unsupported), f"ranges: {loaded}"

    @backend_law("B12")
    async def test_more_than_declared_is_unsupported(self, store: AbstractBackend) -> None:
        can, byte = store.capabilities, memoryview(b"x")
        await self.put(store, 0)
        if can.iov_max < 1024:
            parts = (byte,) * (can.iov_max + 1)
            (stored,) = await store.store([Store(self.key(1), parts)])
            assert isinstance(stored.error, Unsupported), f"iov_max: store said {stored}"
            assert await self.find(store, 1) is None, "unsupported, yet stored"
            into = tuple(poisoned(999)[0] for _ in parts)
            loaded = await self.load_into(store, Load(self.key(0), into))
            assert isinstance(loaded.error, Unsupported), f"iov_max: load said {loaded}"
        if can.max_batch is not None:
            batch = [Store(self.key(number), (byte,)) for number in range(can.max_batch + 1)]
            (result,) = await asyncio.gather(store.store(batch), return_exceptions=True)
            assert isinstance(result, Unsupported), f"max_batch: store gave {result!r}"

    @backend_law("B12", lacks="ttl")
    async def test_ttl_is_unsupported(self, store: AbstractBackend) -> None:
        (stored,) = await store.store([Store(self.key(0), (memoryview(b"x"),), ttl=60.0)])
        assert isinstance(stored.error, Unsupported), f"ttl: store said {stored}"
        assert await self.find(store, 0) is None, "unsupported, yet stored"

    @backend_law("B12", needs="ttl")
    async def test_value_expires(self, store: AbstractBackend) -> None:
        for number, ttl in enumerate((self.ttl_s, None, 3600.0)):
            (stored,) = await store.store(
                [Store(self.key(number), (memoryview(self.value(number)),), ttl)]
            )
            assert stored.status is StoreStatus.STORED
        await asyncio.sleep(2 * self.ttl_s)
        assert await self.get(store, 0) is None, "there after its time"
        assert await self.get(store, 1) == self.value(1), "gone without a ttl"
        assert await self.get(store, 2) == self.value(2), "gone before its time"

    @backend_law("B12", needs="scan")
    async def test_scan_lists_every_value_once(self, store: AbstractBackend) -> None:
        wanted = {self.key(number): 100 + number for number in range(7)}
        for number in range(7):
            await self.put(store, number, 100 + number)
        seen = []
        after = None
        for _ in range(100_000):
            page = await store.scan(after, limit=3)
            assert len(page.values) <= 3, f"{len(page.values)} values, limit 3"
            seen += [(key, found.nbytes) for key, found in page.values if key in wanted]
            if (after := page.after) is None:
                break
        assert sorted(seen) == sorted(wanted.items())

    @backend_law("B12", needs="usage")
    async def test_usage_follows_what_is_stored(self, store: AbstractBackend) -> None:
        """Seen in LMCache#4974."""
        before = await store.usage()
        await self.put(store, 0)
        await self.put(store, 1)
        after = await store.usage()
        assert after.values == before.values + 2
        assert after.nbytes >= before.nbytes + 2 * 999
        await store.delete([self.key(0), self.key(1)])
        assert await store.usage() == before

    @backend_law("B12", needs="prefix_lookup")
    async def test_prefix_ends_at_the_first_absent_key(self, store: AbstractBackend) -> None:
        for number in (0, 1, 3):
            await self.put(store, number)
        keys = [self.key(number) for number in range(5)]
        assert await store.lookup_prefix(keys) == 2
        assert await store.lookup_prefix(keys[:1]) == 1
        assert await store.lookup_prefix(keys[2:]) == 0
        assert await store.lookup_prefix([]) == 0

    @backend_law("B12", needs="conditional_delete")
    async def test_exact_delete_spares_another_value(self, store: AbstractBackend) -> None:
        await self.put(store, 0)
        found = await self.find(store, 0)
        assert found is not None
        assert found.etag is not None, "conditional_delete without etags"
        assert not await store.delete_exact(self.key(0), found.etag + "x")
        assert await self.find(store, 0) is not None, "deleted despite another etag"
        assert await store.delete_exact(self.key(0), found.etag)
        assert await self.find(store, 0) is None
        assert not await store.delete_exact(self.key(0), found.etag)

    @backend_law("B12", needs="remote_lease")
    async def test_hold_tells_which_values_stay(self, store: AbstractBackend) -> None:
        await self.put(store, 0)
        assert list(await store.hold([self.key(0), self.key(1)], 0.01)) == [True, False]

    @backend_law("B12", needs="register")
    async def test_regions_come_and_go(self, store: AbstractBackend) -> None:
        import ctypes

        await self.put(store, 0)
        with mmap.mmap(-1, 1 << 16) as memory:
            anchor = ctypes.c_char.from_buffer(memory)
            view = memoryview(memory)
            region = Region(MemoryKind.HOST, 0, ctypes.addressof(anchor), 1 << 16, view)
            del anchor
            for _ in range(2):
                if await store.register(region):
                    loaded = await self.load_into(store, Load(self.key(0), (view[4096:5095],)))
                    assert loaded.status is LoadStatus.FILLED
                    assert view[4096:5095] == self.value(0)
                    await store.unregister(region)
            del region
            view.release()

    @backend_law("B12", needs="resident")
    async def test_pool_shows_the_same_values(self, store: AbstractBackend) -> None:
        await self.put(store, 0)
        pool, keys = store.pool, [self.key(0), self.key(1)]
        assert list(pool.lengths(keys)) == [999, None]
        leases = [lease for lease in pool.lease(keys, self) if lease is not None]
        assert [bytes(lease.view) for lease in leases] == [self.value(0)]
        pool.release(leases)
        assert pool.drop(keys) == 1
        assert await self.find(store, 0) is None

    @backend_law("B12", needs="persistent")
    async def test_value_is_there_after_reopening(self, store: AbstractBackend) -> None:
        value = await self.put(store, 0)
        await store.aclose()
        again = self.reopen(store)
        if again is None:
            raise SkipTest("no reopen hook")
        async with self.opened(again):
            assert await self.get(again, 0) == value

    @backend_law("B12", needs="shared")
    async def test_two_instances_see_one_store(self, store: AbstractBackend) -> None:
        value = await self.put(store, 0)
        other = self.reopen(store)
        if other is None:
            raise SkipTest("no reopen hook")
        async with self.opened(other):
            assert await self.get(other, 0) == value
            assert (await self.store_one(other, 0, value)).status is StoreStatus.PRESENT
            assert await other.delete([self.key(0)]) == 1
            assert await self.find(store, 0) is None
