"""Values in many cells, and an emulator that dies or hangs."""

import asyncio
import dataclasses
import os

import pytest
from lmcache_backend_bigtable import BigtableBackend
from lmcache_backend_bigtable.config import BigtableConfig
from lmcache_backend_bigtable.serving import PROGRAM, START, Emulator

from lmcache_core.config import load
from lmcache_core.spi import (
    ByteSize,
    ConfigError,
    Key,
    Load,
    LoadStatus,
    Store,
    StoreStatus,
    Unavailable,
)
from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.testing.harness import run_real
from lmcache_core.testing.rig import eventually, opened
from lmcache_core.testing.services import find_program, need_service

KEY = Key(os.urandom(32), os.urandom(32))
MIB = 1 << 20


def serve(folder):
    program = find_program(PROGRAM)
    need_service("bigtable", None if program else f"no {PROGRAM} here", start=START)
    return Emulator(program, folder)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("bt")) as found:
        yield found


def test_value_in_many_cells_comes_back_whole(emulator):
    async def main():
        config = dataclasses.replace(emulator.config(), cell_size=ByteSize(3 * MIB), timeout=20.0)
        backend = BigtableBackend(config, real_context())
        await backend.open()
        value = os.urandom(10 * MIB + 1)
        (stored,) = await backend.store(
            [Store(KEY, (memoryview(value)[:5], memoryview(value)[5:]))]
        )
        assert stored.status is StoreStatus.STORED
        into = memoryview(bytearray(len(value) + 9))
        (loaded,) = await backend.load([Load(KEY, (into[:7], into[7:]))])
        assert (loaded.status, loaded.nbytes) == (LoadStatus.FILLED, len(value))
        assert into[: len(value)] == value
        await backend.aclose()

    run_real(main(), 60.0)


def test_emulator_that_hangs_or_dies_is_unavailable_in_time(tmp_path):
    async def main(server):
        loop = asyncio.get_running_loop()
        backend = BigtableBackend(dataclasses.replace(server.config(), timeout=0.5), real_context())
        await backend.open()
        server.suspend()
        began = loop.time()
        with pytest.raises(Unavailable, match="deadline exceeded"):
            await backend.lookup([KEY])
        assert loop.time() - began < 2.0
        server.resume()
        assert await backend.lookup([KEY]) == [None]
        server.kill()
        (loaded,) = await backend.load([Load(KEY, (memoryview(bytearray(9)),))])
        assert isinstance(loaded.error, Unavailable)
        server.start()
        end = loop.time() + 10
        while True:  # grpc waits a while before it connects again
            try:
                assert await backend.lookup([KEY]) == [None]
                break
            except Unavailable:
                assert loop.time() < end
                await asyncio.sleep(0.05)
        await backend.aclose()

    with serve(tmp_path) as server:
        run_real(main(server), 40.0)


@pytest.mark.parametrize("verb", ["load", "store"])
def test_emulator_killed_in_the_middle_of_a_batch_is_found_again(tmp_path, verb):
    async def main(server):
        config = dataclasses.replace(server.config(), timeout=5.0)
        async with opened(BigtableBackend(config, real_context())) as rig:
            numbers = range(12)
            if verb == "load":
                await rig.keep(*numbers, nbytes=MIB)
            values = [rig.value(number, MIB) for number in numbers]
            buffers = [bytearray(MIB if verb == "load" else value) for value in values]
            kind = Load if verb == "load" else Store
            pairs = zip(numbers, buffers, strict=True)
            batch = [kind(rig.key(number), (memoryview(buffer),)) for number, buffer in pairs]
            ended = []

            def done(at, result):
                ended.append(at)
                if len(ended) == 1:
                    server.kill()

            results = await getattr(rig.backend, verb)(batch, done=done)
            assert len(ended) == len(numbers)
            for result, buffer, value in zip(results, buffers, values, strict=True):
                if result.status in (LoadStatus.FILLED, StoreStatus.STORED):
                    assert buffer == value
                else:
                    assert isinstance(result.error, Unavailable), result
            assert any(result.error for result in results), "it was killed in the middle"
            server.start()

            async def back():
                try:
                    return await rig.lookup(*numbers) == [None] * 12  # it keeps nothing
                except Unavailable:
                    return False

            await eventually(back)
            await rig.keep(1, nbytes=MIB)
            assert await rig.has(1, nbytes=MIB)

    with serve(tmp_path) as server:
        run_real(main(server), 40.0)


def test_what_is_not_there_is_named_at_the_start(emulator):
    async def main():
        right = emulator.config()
        wrong = dataclasses.replace(right, url="bigtable://p/i/other")
        backend = BigtableBackend(wrong, real_context())
        with pytest.raises(ConfigError, match=r"cannot use bigtable://p/i/other.*not found"):
            await backend.open()
        await backend.aclose()

    run_real(main(), 20.0)


def test_url_of_the_familiar_form_is_this_tier():
    tier = load(env={}, flags={"remote_url": "bigtable://p/i/kv"}).config.tiers[-1]
    assert (tier.plugin, tier.options.table) == ("bigtable", "projects/p/instances/i/tables/kv")
    with pytest.raises(ValueError, match="write bigtable://"):
        BigtableConfig(url="bigtable://p/i")
