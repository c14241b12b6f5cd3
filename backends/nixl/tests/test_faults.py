"""A target that dies or hangs, a disk that is full, files that hold something else: misses, refusals, and it is found again."""

import asyncio
import ctypes
import mmap
import os
import subprocess

import pytest

from lmcache_core.spi import (
    ConfigError,
    Load,
    LoadStatus,
    MemoryKind,
    Region,
    Secret,
    Store,
    StoreStatus,
    Unavailable,
)

MIB = 1 << 20
QUICK = {"timeout": 0.5}


@pytest.mark.parametrize("verb", ["load", "store"])
def test_target_killed_in_the_middle_of_a_batch_is_found_again(lend, tier, drive, eventually, verb):
    """Seen in Mooncake#3299."""
    target = lend()

    async def main():
        async with tier(backend="UCX", address=target.address, **QUICK) as rig:
            numbers = range(12)
            if verb == "load":
                await rig.keep(*numbers, nbytes=2 * MIB)
            buffers = [bytearray(rig.value(n, 2 * MIB)) for n in numbers]
            kind = Load if verb == "load" else Store
            items = [
                kind(rig.key(n), (memoryview(buffer),))
                for n, buffer in zip(numbers, buffers, strict=True)
            ]
            gone = []

            def done(at, result):
                if not gone:
                    gone.append(at)
                    target.kill()

            results = await getattr(rig.backend, verb)(items, done=done)
            for result in results:
                good = result.status in (LoadStatus.FILLED, StoreStatus.STORED)
                assert good or isinstance(result.error, Unavailable), result
            with pytest.raises(Unavailable):
                await rig.lookup(1)
            assert isinstance((await rig.get(1))[0].error, Unavailable)
            target.start()

            async def back():
                try:
                    return await rig.lookup(1) == [None]  # in memory only
                except Unavailable:
                    return False

            await eventually(back)
            await asyncio.sleep(0.3)
            await rig.keep(1)
            assert await rig.has(1)

    drive(main())


def test_hanging_target_is_unavailable_after_the_timeout(lend, tier, drive, eventually):
    target = lend()

    async def main():
        async with tier(backend="UCX", address=target.address, **QUICK) as rig:
            await rig.keep(1)
            target.suspend()
            began = asyncio.get_running_loop().time()
            with pytest.raises(Unavailable, match="no answer within"):
                await rig.lookup(1)
            loaded, _ = await rig.get(1)
            assert isinstance(loaded.error, Unavailable)
            stored = await rig.put(2)
            assert isinstance(stored.error, Unavailable)
            assert asyncio.get_running_loop().time() - began < 8.0
            target.resume()

            async def back():
                return (await rig.get(1))[0].status is LoadStatus.FILLED

            await eventually(back)
            assert await rig.has(1)

    drive(main())


def test_memory_is_given_back_although_a_read_from_a_hanging_target_goes_on(
    lend, tier, drive, eventually, monkeypatch
):
    """Over TCP a read needs the other side; what NIXL has begun only the end of its agent ends."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    target = lend()

    async def main():
        async with tier(backend="UCX", address=target.address, **QUICK) as rig:
            nbytes = 16 * MIB
            await rig.keep(1, nbytes=nbytes)
            with mmap.mmap(-1, 2 * nbytes) as memory:
                at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                view = memoryview(memory)
                region = Region(MemoryKind.HOST, 0, at, view.nbytes, view)
                assert await rig.backend.register(region)
                batch = [Load(rig.key(1), (view[:nbytes],)), Load(rig.key(1), (view[nbytes:],))]
                load = asyncio.ensure_future(rig.backend.load(batch))
                await asyncio.sleep(0.01)
                target.suspend()
                load.cancel()
                began = asyncio.get_running_loop().time()
                await asyncio.wait([load])
                took = asyncio.get_running_loop().time() - began
                assert took < rig.backend.capabilities.quiescence_s + 3
                view[:] = b"\xee" * view.nbytes
                target.resume()
                await asyncio.sleep(0.3)
                assert view.tobytes().count(0xEE) == view.nbytes, "written after the load had ended"

                async def back():
                    return (await rig.get(1, nbytes))[0].status is LoadStatus.FILLED

                await eventually(back)
                await rig.backend.unregister(region)
                del region, batch, load
                view.release()

    drive(main())


def test_full_target_lets_the_oldest_go_and_refuses_what_is_too_large(lend, tier, drive):
    target = lend(4 * MIB)

    async def main():
        async with tier(backend="UCX", address=target.address, **QUICK) as rig:
            await rig.keep(*range(6), nbytes=MIB)
            assert [f and f.nbytes for f in await rig.lookup(0, 5)] == [
                None,
                len(rig.value(5, MIB)),
            ]
            stored = await rig.put(9, 5 * MIB)
            assert stored.status is StoreStatus.REFUSED
            assert "too large" in stored.reason
            assert await rig.has(5, nbytes=MIB)

    drive(main())


def test_wrong_token_is_refused_at_the_start(lend, tier, drive, tmp_path):
    secret = tmp_path / "token"
    secret.write_text("right\n")
    target = lend(MIB, "--token-file", str(secret))

    async def main():
        with pytest.raises(ConfigError, match=f"target {target.address}: wrong token"):
            async with tier(backend="UCX", address=target.address, token=Secret("wrong")):
                pass
        async with tier(backend="UCX", address=target.address, token=Secret("right")) as rig:
            await rig.keep(1)

    drive(main())


def test_writer_that_stops_answering_leaves_nothing_behind(lend, tier, drive):
    """A value that its writer has not committed is never seen, and its memory comes back."""
    target = lend(4 * MIB)

    async def main():
        async with tier(backend="UCX", address=target.address, **QUICK) as rig:
            for number in range(4):
                store = asyncio.ensure_future(rig.put(number, 3 * MIB))
                await asyncio.sleep(0.002 * number)
                store.cancel()
                await asyncio.wait([store])
                await rig.backend.delete([rig.key(number)])
            await rig.keep(9, nbytes=3 * MIB)
            assert await rig.has(9, nbytes=3 * MIB)

    drive(main())


@pytest.fixture
def small(tmp_path):
    """A memory file system of 4 MiB, or a skip."""
    if os.geteuid():
        pytest.skip("mounting needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_refuses_and_serves_loads(small, tier, drive):
    async def main():
        async with tier(path=str(small / "kv")) as rig:
            said = [(await rig.put(number, MIB)) for number in range(6)]
            assert said[0].status is StoreStatus.STORED
            assert said[-1].status is StoreStatus.REFUSED, said[-1]
            assert "no space left" in said[-1].reason
            assert await rig.lookup(5) == [None]
            assert await rig.has(0, nbytes=MIB)
            assert await rig.backend.delete([rig.key(0)]) == 1
            await rig.keep(7, nbytes=MIB // 2)
            assert not os.listdir(small / "kv/tmp")

    drive(main())


def test_folder_belongs_to_one_process_unless_it_is_shared(tmp_path, tier, drive):
    async def main():
        path = str(tmp_path / "kv")
        async with tier(path=path) as rig:
            await rig.keep(1)
            with pytest.raises(Unavailable, match="belongs to another process"):
                async with tier(path=path):
                    pass
        async with tier(path=path, shared=True) as one, tier(path=path, shared=True) as other:
            assert await one.has(1)
            assert await other.has(1)
            said = await asyncio.gather(one.put(2), other.put(2))
            assert {each.status for each in said} == {StoreStatus.STORED, StoreStatus.PRESENT}
            assert await other.backend.delete([one.key(2)]) == 1
            assert await one.lookup(2) == [None]

    drive(main())


def test_object_server_that_is_gone_is_unavailable_at_once_and_found_again(
    weed, objects, tier, drive, eventually
):
    async def main():
        async with tier(**objects(weed)) as rig:
            await rig.keep(1)
            weed.kill()
            began = asyncio.get_running_loop().time()
            with pytest.raises(Unavailable, match="does not answer"):
                await rig.lookup(1)
            assert isinstance((await rig.get(1))[0].error, Unavailable)
            assert (await rig.put(2)).status is StoreStatus.FAILED
            assert asyncio.get_running_loop().time() - began < 5.0
            weed.start()

            async def back():
                return (await rig.get(1))[0].status is LoadStatus.FILLED

            await eventually(back)
            await rig.keep(2)
            assert await rig.has(1, 2)
            await rig.backend.delete([rig.key(1), rig.key(2)])
            assert await rig.lookup(1, 2) == [None, None]

    drive(main())


def test_object_server_that_hangs_keeps_no_memory_for_longer_than_is_promised(
    weed, objects, tier, drive, eventually
):
    """The kit of AWS would try eleven times, for a minute and more."""

    async def main():
        loop = asyncio.get_running_loop()
        async with tier(**objects(weed)) as rig:
            await rig.keep(1)
            weed.suspend()
            try:
                load, store = (asyncio.ensure_future(each) for each in (rig.get(1), rig.put(2)))
                await asyncio.sleep(0.5)
                store.cancel()
                began = loop.time()
                loaded, _ = await load
                assert isinstance(loaded.error, Unavailable)
                await asyncio.wait([store])
                assert loop.time() - began < rig.backend.capabilities.quiescence_s
            finally:
                weed.resume()

            async def back():
                return (await rig.get(1))[0].status is LoadStatus.FILLED

            await eventually(back)

    drive(main())


def test_wrong_bucket_or_key_is_refused_at_the_start(weed, objects, tier, drive):
    async def main():
        wrong = objects(weed) | {"secret_key": Secret("wrong")}
        for options in (objects(weed, bucket="absent"), wrong):
            with pytest.raises(ConfigError, match="check endpoint, bucket, region and keys"):
                async with tier(**options):
                    pass

    drive(main())
