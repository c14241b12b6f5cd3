"""Faults that take long to show: every night, `pytest backends/mooncake/tests/faults.py`."""

import asyncio
import hashlib
import subprocess
import sys

import pytest

from lmcache_core.spi import (
    Key,
    StoreStatus,
    Unavailable,
)

MIB = 1 << 20
BIG = 16 * MIB


async def taken(work):
    """(result, seconds)."""
    began = asyncio.get_running_loop().time()
    result = await work
    return result, asyncio.get_running_loop().time() - began


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


@pytest.mark.slow
def test_master_that_hangs_dies_and_comes_back_is_found_again(serve, tier, drive, eventually):
    """Seen in Mooncake#2621."""
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


def test_leased_values_stay_and_the_next_is_refused(serve, tier, drive):
    """Seen in Mooncake#3076."""
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


def test_segment_of_ones_own_is_used(serve, tier, drive):
    server = serve()
    server.provider.kill()

    async def main():
        async with tier(server.config(segment=32 << 20)) as rig:
            assert not rig.backend.capabilities.persistent
            for _ in range(100):
                if (await rig.put(1)).status is StoreStatus.STORED:
                    break
                await asyncio.sleep(0.05)
            assert await rig.has(1)

    drive(main())
