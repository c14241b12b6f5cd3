"""A master or a segment that dies, hangs or is full: errors in time, and nothing that anybody has to mend."""

import asyncio
import hashlib
import subprocess
import sys

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


def test_hanging_segment_costs_no_more_than_the_timeout(serve, tier, drive, eventually):
    server = serve(nbytes=128 * MIB)

    async def main():
        async with tier(server.config(timeout=0.5)) as rig:
            await rig.keep(1, nbytes=BIG)
            server.provider.suspend()
            (loaded, _), seconds = await taken(rig.get(1, BIG))
            assert isinstance(loaded.error, Unavailable)
            assert "\n" not in str(loaded.error)
            assert seconds < 3.0
            stored, seconds = await taken(rig.put(2, BIG))
            assert isinstance(stored.error, Unavailable)
            assert seconds < 3.0
            server.provider.resume()
            await eventually(lambda: rig.has(1, nbytes=BIG))

            async def kept():
                return (await rig.put(3, BIG)).status is StoreStatus.STORED

            await eventually(kept)

    drive(main())


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
            assert loaded.status is not LoadStatus.FILLED or buffer == value(1, BIG)
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


def value(number, nbytes):
    return hashlib.shake_128(b"%d" % number).digest(nbytes)


@pytest.mark.slow
def test_master_that_hangs_dies_and_comes_back_is_found_again(serve, tier, drive, eventually):
    server = serve()

    async def main():
        async with tier(server.config(timeout=0.5)) as rig:
            await rig.keep(1)
            server.master.suspend()
            for work in (rig.lookup(1), rig.get(1), rig.put(2)):
                began = asyncio.get_running_loop().time()
                try:
                    result = await work
                except Unavailable:
                    continue
                error = getattr(result, "error", None) or result[0].error
                assert isinstance(error, Unavailable)
                assert asyncio.get_running_loop().time() - began < 3.0
            server.master.resume()
            await eventually(lambda: rig.has(1))
            server.master.kill()
            with pytest.raises(Unavailable):
                await rig.lookup(1)
            server.master.start()

            async def kept():  # the segment makes itself known again
                return (await rig.put(3)).status is StoreStatus.STORED

            await eventually(kept)
            assert await rig.has(3)
            assert await rig.lookup(1) == [None]

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
                    assert buffer == value(number, 8 * MIB)
            usage = await rig.backend.usage()
            assert usage.limit == 64 * MIB
            too_large = await rig.put(99, 65 * MIB)
            assert too_large.status is StoreStatus.REFUSED

    drive(main())


def test_leased_values_stay_and_the_next_is_refused(serve, tier, drive):
    server = serve("--default_kv_lease_ttl=60000", nbytes=32 * MIB)

    async def main():
        async with tier(server.config(lease=60.0)) as rig:
            await rig.keep(0, 1, 2, nbytes=8 * MIB)
            keys = [load_key(n) for n in (0, 1, 2, 7)]
            assert list(await rig.backend.hold(keys, 5.0)) == [True, True, True, False]
            assert list(await rig.backend.hold(keys, 61.0)) == [False] * 4
            for number in range(3, 8):
                await rig.put(number, 8 * MIB)
            assert await rig.has(0, 1, 2, nbytes=8 * MIB)
            assert await rig.backend.delete(keys[:3]) == 3

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


@pytest.mark.slow
def test_process_with_a_hanging_store_ends_in_time(serve, tmp_path):
    server = serve(nbytes=128 * MIB)
    script = f"""
import asyncio, os, signal
from lmcache_backend_mooncake import MooncakeBackend
from lmcache_backend_mooncake.config import MooncakeConfig
from lmcache_core.spi import Key, Load, Store
from lmcache_core.testing.contexts import test_context
async def main():
    backend = MooncakeBackend(MooncakeConfig(url={server.url!r}, timeout=30.0), test_context())
    await backend.open()
    key, value = Key(bytes(32), bytes(32)), bytearray({BIG})
    await backend.store([Store(key, (memoryview(value),))])
    os.kill({server.provider._child.pid}, signal.SIGSTOP)
    task = asyncio.ensure_future(backend.load([Load(key, (memoryview(value),))]))
    await asyncio.sleep(0.2)
    task.cancel()
    await asyncio.wait([task])
    await backend.aclose()
    print("closed")
asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "closed\n"), ended.stderr
