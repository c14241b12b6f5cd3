"""What only a resident tier does."""

import asyncio
import hashlib

import pytest
from lmcache_backend_cpu import CPUBackend
from lmcache_backend_cpu.config import CPUConfig

from lmcache_core.memory.arena import Arena
from lmcache_core.memory.pool import Pool
from lmcache_core.policies.lru import LRU, LRUConfig
from lmcache_core.spi import Closed, Key, Load, LoadStatus, MemoryOptions, Store, StoreStatus
from lmcache_core.testing.contexts import test_context as real_context

NBYTES = 4096


def key(number):
    digest = hashlib.sha256(b"%d" % number).digest()
    return Key(digest[::-1], digest)


def value(number):
    return bytes([number % 251]) * NBYTES


class Tier:
    """A backend of ten values, with its pool and the options it asked for."""

    def __init__(self, config=None):
        self.options = None
        self.backend = CPUBackend(
            config or CPUConfig(populate=False), real_context(create_pool=self.create_pool)
        )

    def create_pool(self, options):
        self.options = options
        capacity = 10 * NBYTES
        return Pool(Arena(capacity, options), LRU(LRUConfig(), capacity))

    async def __aenter__(self):
        await self.backend.open()
        return self

    async def __aexit__(self, *exit_info):
        self.backend.pool.check()
        await self.backend.aclose()

    async def put(self, *numbers):
        batch = [Store(key(number), (memoryview(value(number)),)) for number in numbers]
        return [stored.status for stored in await self.backend.store(batch)]

    async def have(self, *numbers):
        found = await self.backend.lookup([key(number) for number in numbers])
        return [each is not None for each in found]


def run(body):
    asyncio.run(asyncio.wait_for(body(), 30))


def test_full_tier_evicts_and_goes_on_storing():
    async def body():
        async with Tier() as tier:
            for number in range(30):
                assert await tier.put(number) == [StoreStatus.STORED]
            assert await tier.have(*range(30)) == [False] * 20 + [True] * 10
            usage = await tier.backend.usage()
            assert (usage.nbytes, usage.values, usage.limit) == (10 * NBYTES, 10, 10 * NBYTES)

    run(body)


def test_tier_full_of_leased_values_refuses_and_keeps_them():
    async def body():
        async with Tier() as tier:
            await tier.put(*range(10))
            leases = tier.backend.pool.lease([key(number) for number in range(10)], "engine")
            (stored,) = await tier.backend.store([Store(key(20), (memoryview(value(20)),))])
            assert (stored.status, stored.reason) == (StoreStatus.REFUSED, "full")
            assert all(lease.view == value(number) for number, lease in enumerate(leases))
            tier.backend.pool.release(leases)
            assert await tier.put(20) == [StoreStatus.STORED]

    run(body)


def test_failed_copy_leaves_nothing_behind(monkeypatch):
    async def body():
        async with Tier() as tier:
            released = memoryview(bytearray(NBYTES))
            store = Store(key(1), (released,))
            monkeypatch.setattr("lmcache_backend_cpu.backend.ops.copy", lambda dst, src: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                await tier.backend.store([store])
            monkeypatch.undo()
            assert await tier.have(1) == [False]
            assert (await tier.backend.usage()).nbytes == 0
            assert await tier.put(1) == [StoreStatus.STORED]

    run(body)


def test_store_that_the_pool_did_not_take_is_not_called_stored(monkeypatch):
    async def body():
        async with Tier() as tier:

            def close_first(data, seed):
                tier.backend.pool.close()
                return bytes(16)

            monkeypatch.setattr("lmcache_backend_cpu.backend.ops.digest", close_first)
            assert await tier.put(1) == [StoreStatus.REFUSED]

    run(body)


def test_value_is_loaded_in_pieces_and_across_buffers():
    async def body():
        async with Tier() as tier:
            content = bytes(range(256)) * 16
            await tier.backend.store(
                [Store(key(1), (memoryview(content[:100]), memoryview(content[100:])))]
            )
            first, second = bytearray(10), bytearray(3000)
            (loaded,) = await tier.backend.load(
                [Load(key(1), (memoryview(first), memoryview(second)), 95, 1005)]
            )
            assert (loaded.status, loaded.nbytes) == (LoadStatus.FILLED, 1005)
            assert first + second[:995] == content[95:1100]
            assert second[995:] == bytes(2005)

    run(body)


def test_options_reach_the_arena():
    async def body():
        tier = Tier(CPUConfig(huge_pages=True, numa_node=0, populate=False))
        async with tier:
            await tier.put(1)
        assert tier.options == MemoryOptions(huge_pages=True, numa_node=0, populate=False)

    run(body)


def test_there_is_no_pool_before_opening():
    with pytest.raises(Closed, match="not open"):
        _ = Tier().backend.pool


def test_footprint_is_what_the_pool_charges():
    async def body():
        async with Tier() as tier:
            for nbytes in (1, 4095, 4096, 4097, 10000):
                before = (await tier.backend.usage()).nbytes
                name = Key(bytes(32), hashlib.sha256(b"%d" % nbytes).digest())
                await tier.backend.store([Store(name, (memoryview(bytes(nbytes)),))])
                after = (await tier.backend.usage()).nbytes
                assert after - before == tier.backend.footprint(nbytes)

    run(body)
