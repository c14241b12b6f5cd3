"""A master or a segment that dies, hangs or is full: errors in time, and nothing that anybody has to mend."""

import asyncio
import hashlib

import pytest
from lmcache_backend_mooncake import MooncakeBackend

from lmcache_core.spi import (
    Key,
    Load,
    LoadStatus,
    StoreStatus,
    Unavailable,
)
from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.testing.rig import noise

MIB = 1 << 20
BIG = 16 * MIB


async def taken(work):
    """(result, seconds)."""
    began = asyncio.get_running_loop().time()
    result = await work
    return result, asyncio.get_running_loop().time() - began


def test_cancelled_load_from_a_hanging_segment_ends_at_once_and_touches_nothing_later(
    serve, tier, drive, eventually
):
    server = serve(nbytes=256 * MIB)

    async def main():
        async with tier(server.config(timeout=20.0)) as rig:
            await rig.keep(0)
            await rig.keep(*range(1, 5), nbytes=BIG)
            server.provider.suspend()
            buffers = [bytearray(BIG) for _ in range(4)]
            keys = [load_key(n) for n in range(1, 5)]
            loads = [Load(k, (memoryview(b),)) for k, b in zip(keys, buffers, strict=True)]
            task = asyncio.ensure_future(rig.backend.load(loads))
            await asyncio.sleep(0.2)
            assert not task.done()
            task.cancel()
            _, seconds = await taken(asyncio.wait([task]))
            assert task.cancelled()
            assert seconds < 2.0
            for buffer in buffers:
                buffer[:] = b"\xee" * BIG
            server.provider.resume()
            await eventually(lambda: rig.has(1, 2, 3, 4, nbytes=BIG))
            assert all(buffer.count(b"\xee") == BIG for buffer in buffers)
            await eventually(lambda: rig.has(0))

    drive(main())


def load_key(number):
    return Key(hashlib.sha256(b"space").digest(), hashlib.sha256(b"%d" % number).digest())


def test_killed_segment_takes_its_own_values_only_and_a_new_one_is_used(
    serve, tier, drive, eventually
):
    server = serve(nbytes=128 * MIB)

    async def main():
        async with tier(server.config()) as rig:
            await rig.keep(*range(1, 5), nbytes=BIG)
            task = asyncio.ensure_future(rig.get(1, BIG))
            await asyncio.sleep(0.003)  # mid-batch
            server.provider.kill()
            loaded, buffer = await task
            assert loaded.status is not LoadStatus.FILLED or buffer == noise(1, BIG)
            (loaded, _), seconds = await taken(rig.get(2, BIG))
            assert loaded.status is not LoadStatus.FILLED
            assert seconds < 2.0

            async def noticed():
                return await rig.lookup(1, 2, 3, 4) == [None] * 4

            await eventually(noticed)
            stored = await rig.put(5)
            assert stored.status is StoreStatus.REFUSED
            assert stored.reason == "full: no segment has room (-200)"
            server.provider.start()

            async def kept():
                return (await rig.put(5)).status is StoreStatus.STORED

            await eventually(kept)
            assert await rig.has(5)

    drive(main())


def test_full_store_evicts_and_lookup_tells(serve, tier, drive):
    server = serve("--default_kv_lease_ttl=200", nbytes=64 * MIB)

    async def main():
        async with tier(server.config()) as rig:
            kept = []
            for number in range(12):
                stored = await rig.put(number, 8 * MIB)
                assert stored.status in (StoreStatus.STORED, StoreStatus.REFUSED)
                if stored.status is StoreStatus.STORED:
                    kept.append(number)
                await asyncio.sleep(0.02)
            found = await rig.lookup(*kept)
            there = [n for n, one in zip(kept, found, strict=True) if one is not None]
            assert 0 < len(there) < len(kept)
            for number in kept:
                loaded, buffer = await rig.get(number, 8 * MIB)
                assert loaded.status in (LoadStatus.FILLED, LoadStatus.MISSED)
                if loaded.status is LoadStatus.FILLED:
                    assert buffer == noise(number, 8 * MIB)
            usage = await rig.backend.usage()
            assert usage.limit == 64 * MIB
            too_large = await rig.put(99, 65 * MIB)
            assert too_large.status is StoreStatus.REFUSED

    drive(main())


def test_no_master_and_no_way_are_named(drive, serve):
    from lmcache_backend_mooncake.config import MooncakeConfig

    async def main():
        for url, words in (
            ("mooncakestore://no.such.host:1", "no way to the master at no.such.host:1"),
            ("mooncakestore://127.0.0.1:9", "cannot use the master at 127.0.0.1:9"),
        ):
            backend = MooncakeBackend(MooncakeConfig(url=url, timeout=0.3), real_context())
            with pytest.raises(Unavailable, match=words):
                await backend.open()
            await backend.aclose()

    drive(main())
