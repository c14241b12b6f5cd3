"""Faults that take long to show: every night, `pytest backends/mooncake/tests/faults.py`."""

import asyncio
import contextlib
import hashlib
import itertools
import subprocess
import sys

import pytest
from lmcache_backend_mooncake.config import MooncakeConfig
from lmcache_backend_mooncake.serving import Master, Provider, find_server

from lmcache_core.registry import Registry
from lmcache_core.spi import (
    Key,
    Load,
    LoadStatus,
    StoreStatus,
    Unavailable,
)
from lmcache_core.storage.build import build
from lmcache_core.testing.harness import run_real
from lmcache_core.testing.rig import eventually as until
from lmcache_core.testing.services import Etcd, find_program, need_service
from lmcache_core.testing.worlds import below, closed, key_of, put, served

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


class Candidate(Master):
    """One of several masters."""

    def ready(self):
        return '"status":"ok"' in self.ask("/health")

    @property
    def leads(self):
        said = self.ask("/health")
        return '"role":"leader"' in said and '"service_ready":true' in said


@pytest.fixture
def elected(make_server, tmp_path):
    """(URL, two masters with the leader first): elected by etcd, with one segment."""

    def folder(name):
        (tmp_path / name).mkdir()
        return tmp_path / name

    package = find_server()
    with contextlib.ExitStack() as stack:
        program = find_program("etcd")
        need_service("mooncake", None if program else "no etcd here", start="bash .ci/system.sh")
        etcd = stack.enter_context(Etcd(program, folder("etcd")))
        endpoint = etcd.member
        flags = ("--client_ttl=2", "--enable_ha=true", f"--etcd_endpoints={endpoint}")
        masters = [
            stack.enter_context(Candidate(package, folder(f"master{number}"), *flags))
            for number in range(2)
        ]
        url = f"etcd://{endpoint}"

        async def leader():
            return any(master.leads for master in masters)

        asyncio.run(until(leader, 30.0))
        masters.sort(key=lambda master: not master.leads)
        stack.enter_context(
            Provider(package, folder("provider"), masters[0], 64 * MIB, elected=url)
        )
        yield url, masters


def test_another_master_leads_when_one_is_killed_and_nobody_has_to_do_anything(elected, eventually):
    url, masters = elected
    config = below("mooncake", MooncakeConfig(url=url, timeout=0.5), deadline=0.5)
    numbers = itertools.count()

    async def main():
        loop = asyncio.get_running_loop()
        manager = await build(config, Registry())
        tier = manager.tiers[0].backend

        async def kept():
            """Whether new values reach the store, and come back."""
            chunks = [key_of(next(numbers)) for _ in range(4)]
            put(manager, chunks, 50_001)
            await manager.flush()
            with contextlib.suppress(Unavailable):
                if None not in (found := await tier.lookup(chunks)):
                    buffers = [memoryview(bytearray(one.nbytes)) for one in found]
                    pairs = zip(chunks, buffers, strict=True)
                    loaded = await tier.load([Load(key, (view,)) for key, view in pairs])
                    return {one.status for one in loaded} == {LoadStatus.FILLED}
            return False

        assert await kept()
        masters[0].kill()
        for _ in range(20):  # its lease on leading has not ended yet
            began = loop.time()
            assert (await served(manager, [key_of(next(numbers))]))[0] == 0
            assert loop.time() - began < 1.5
        await eventually(kept, 40.0)
        assert masters[1].leads
        masters[0].start()
        began = loop.time()
        await closed(manager)
        assert loop.time() - began < 5.0, "the library's end of a client stops the whole process"

    run_real(main(), 70.0)


def test_nobody_who_elects_is_said_in_one_line(tier, drive):
    async def main():
        with pytest.raises(Unavailable, match="is a master elected") as error:
            async with tier(MooncakeConfig(url="etcd://127.0.0.1:9", timeout=0.5)):
                pass
        assert "\n" not in str(error.value)

    drive(main())
