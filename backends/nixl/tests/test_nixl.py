"""Stripes, configuration, plugins that are not here, and values that somebody spoiled."""

import itertools
import mmap
import os
import subprocess
import sys
from itertools import accumulate

import pytest
from lmcache_backend_nixl import NixlBackend
from lmcache_backend_nixl.agent import plugin_problem
from lmcache_backend_nixl.config import NixlConfig, RailConfig
from lmcache_backend_nixl.memory import Staging, address

from lmcache_core.registry import Registry
from lmcache_core.spi import (
    ByteSize,
    ConfigError,
    Corrupt,
    Load,
    MemoryKind,
    Region,
    Store,
    StoreStatus,
    Unavailable,
    section,
)
from lmcache_core.storage import Reason
from lmcache_core.storage.build import build
from lmcache_core.testing.worlds import below, closed, key_of, plain_frame, put, served

KIB, MIB = 1 << 10, 1 << 20
NBYTES = 50_001
CHUNKS = [key_of(number) for number in range(8)]


def striped(tmp_path, *more):
    rails = tuple(RailConfig(path=str(tmp_path / name)) for name in "abc")
    return {"rails": (*rails, *more), "stripe": ByteSize(64 * KIB)}


def test_long_value_lies_on_every_rail_and_a_short_one_on_one(tmp_path, tier, drive):
    async def main():
        async with tier(**striped(tmp_path)) as rig:
            await rig.keep(1, nbytes=MIB)
            await rig.keep(2, nbytes=100 * KIB)
            files = {
                name: [f for _, _, found in os.walk(tmp_path / name) for f in found if f != "lock"]
                for name in "abc"
            }
            long = rig.key(1).text
            assert sorted(itertools.chain(*files.values())) == sorted(
                [f"{long}.{number}-3" for number in range(3)] + [rig.key(2).text]
            )
            assert all(any(f.startswith(long) for f in found) for found in files.values())
            assert await rig.has(1, nbytes=MIB)
            page = await rig.backend.scan()
            assert {key for key, _ in page.values} == {rig.key(1), rig.key(2)}
            assert not page.foreign

    drive(main())


def test_value_with_a_part_missing_is_absent_and_can_be_stored_anew(tmp_path, tier, drive):
    async def main():
        async with tier(**striped(tmp_path)) as rig:
            for part in range(3):
                await rig.keep(1, nbytes=MIB)
                (path,) = tmp_path.glob(f"*/*/{rig.key(1).text}.{part}-3")
                path.unlink()
                assert await rig.lookup(1) == [None]
                assert (await rig.get(1, MIB))[0].status.value == "missed"
                if part == 0:
                    await rig.keep(1, nbytes=MIB)
                else:
                    assert await rig.backend.delete([rig.key(1)]) == 1
                    await rig.keep(1, nbytes=MIB)
                assert await rig.has(1, nbytes=MIB)
                assert await rig.backend.delete([rig.key(1)]) == 1

    drive(main())


def test_rails_may_be_of_different_kinds(tmp_path, tier, lend, drive):
    target = lend()

    async def main():
        memory = RailConfig(backend="UCX", address=target.address)
        async with tier(**striped(tmp_path, memory)) as rig:
            await rig.keep(*range(4), nbytes=MIB)
            assert await rig.has(*range(4), nbytes=MIB)
            assert rig.backend.capabilities.shared
            target.kill()
            loaded, _ = await rig.get(1, MIB)
            assert isinstance(loaded.error, Unavailable)
            assert (await rig.put(7, MIB)).status is StoreStatus.FAILED

    drive(main())


def test_many_values_of_a_batch_come_back_as_they_were(lend, tier, drive):
    """The target reads several of them in one transfer."""
    target, count = lend(), 40

    async def main():
        async with tier(backend="UCX", address=target.address) as rig:
            sizes = [KIB * (number % 7 * 37 + 1) for number in range(count)]
            memory = memoryview(mmap.mmap(-1, 2 * sum(sizes)))
            region = Region(MemoryKind.HOST, 0, address(memory), memory.nbytes, memory)
            assert await rig.backend.register(region)
            views = [memory[end - n : end] for n, end in zip(sizes, accumulate(sizes), strict=True)]
            for number, view in enumerate(views):
                view[:] = rig.value(number, view.nbytes)[: view.nbytes]
            pairs = [(rig.key(number), (view,)) for number, view in enumerate(views)]
            stored = await rig.backend.store([Store(*pair) for pair in pairs])
            assert {each.status for each in stored} == {StoreStatus.STORED}
            before = bytes(memory)
            memory[: sum(sizes)] = bytes(sum(sizes))
            loaded = await rig.backend.load([Load(*pair) for pair in reversed(pairs)])
            assert [each.nbytes for each in loaded] == sizes[::-1]
            assert memory == before
            await rig.backend.unregister(region)

    drive(main())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "POSX", "path": "/kv"}, "backend is 'POSX'; did you mean POSIX"),
        ({"path": "kv"}, "write a whole path"),
        ({"backend": "UCX"}, "write HOST:PORT"),
        ({"path": "/kv", "rails": (RailConfig(path="/a"),)}, "rails stand instead"),
        ({"path": "/kv", "stripe": ByteSize(1)}, "stripe is 1; the least is 65536"),
    ],
)
def test_configuration_that_cannot_work_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        NixlConfig(**options)


@pytest.mark.parametrize("plugin", ["GDS", "GDS_MT", "HF3FS", "LIBFABRIC", "DOCA_MEMOS"])
def test_plugin_that_does_not_load_is_refused_by_what_it_lacks(tmp_path, tier, drive, plugin):
    """Seen in LMCache#605."""
    problem = plugin_problem(plugin)
    if problem is None:
        pytest.skip("it loads here")
    assert {p for p in ("POSIX", "UCX", "OBJ") if plugin_problem(p)} == set()
    assert "no such plugin" in problem or ".so" in problem
    assert f"{plugin}: {problem}" in NixlBackend.remark()
    assert "\n" not in NixlBackend.remark()

    async def main():
        with pytest.raises(ConfigError) as caught:
            async with tier(backend=plugin, path=str(tmp_path), address="127.0.0.1:1"):
                pass
        assert problem in str(caught.value)

    drive(main())


def test_nothing_of_torch_is_imported(tmp_path):
    code = (
        "import sys; from lmcache_backend_nixl import NixlBackend; assert 'nixl_cu12' not in sys.modules;"
        "assert NixlBackend.unavailable() is None; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(params=["POSIX", "UCX", "OBJ"])
def place(request, tmp_path):
    """Options of a tier that others use, too."""
    if request.param == "UCX":
        return {"backend": "UCX", "address": request.getfixturevalue("lend")().address}
    if request.param == "OBJ":
        return request.getfixturevalue("objects")(request.getfixturevalue("weed"))
    return {"path": str(tmp_path / "kv"), "shared": True}


@pytest.mark.parametrize(
    "spoiled",
    [
        pytest.param(lambda: plain_frame(CHUNKS[7], NBYTES), id="another key's value"),
        pytest.param(lambda: b"garbage" * 5000, id="garbage"),
        pytest.param(lambda: b"", id="nothing"),
    ],
)
def test_damage_is_a_miss_and_is_stored_anew(place, tier, drive, eventually, spoiled):
    async def main():
        config = below("nixl", NixlConfig(**place), deadline=5.0)
        first = await build(config, Registry())
        assert all(put(first, CHUNKS[:5], NBYTES))
        await first.flush()
        await first.aclose()
        async with tier(**place) as rig:
            assert await rig.backend.delete(CHUNKS[3:4]) == 1
            (stored,) = await rig.backend.store([Store(CHUNKS[3], (memoryview(spoiled()),))])
            assert stored.status is StoreStatus.STORED
            second = await build(config, Registry())
            assert (await served(second, CHUNKS[:5]))[0] == 3

            async def removed():
                return not second.tiers[0].bad and await rig.backend.lookup(CHUNKS[3:4]) == [None]

            await eventually(removed)
        assert all(put(second, CHUNKS[3:4], NBYTES))
        await second.flush()
        third = await build(config, Registry())
        assert await served(third, CHUNKS[:5]) == (5, Reason.COMPLETE)
        await closed(second, third)
        async with tier(**place) as rig:
            await rig.backend.delete(CHUNKS)

    drive(main())


def test_object_that_nobody_here_wrote_is_a_miss(weed, objects, tier, drive):
    async def main():
        async with tier(**objects(weed)) as rig:
            whole = memoryview(mmap.mmap(-1, 4096))
            whole[:7] = b"garbage"
            (rail,) = rig.backend._rails
            rail._write(rig.key(1).text, whole)
            loaded, buffer = await rig.get(1)
            assert isinstance(loaded.error, Corrupt), loaded
            assert not any(buffer)
            await rig.backend.delete([rig.key(1)])
            await rig.keep(1)

    drive(main())


def test_staging_memory_is_lent_in_pages_and_joined_again():
    staging = Staging(5 * 4096)
    first, second = staging.take(1), staging.take(8192)
    assert (first, second) == ((0, 4096), (4096, 8192))
    assert staging.take(3 * 4096) is None
    staging.give(first)
    staging.give(second)
    assert staging.take(5 * 4096) == (0, 5 * 4096)


def test_sections_and_addresses_of_views():
    data = bytearray(range(20))
    views = (memoryview(data)[:5], memoryview(b""), memoryview(data)[5:20])
    for start, nbytes in ((0, 20), (3, 4), (5, 1), (7, 13), (20, 0)):
        joined = b"".join(section(views, start, nbytes))
        assert joined == bytes(data[start : start + nbytes])
    assert address(views[2]) == address(views[0]) + 5


def test_nixl_s_own_exchange_by_etcd_is_not_used_even_where_it_is_set_up_for_others():
    """With an etcd that hangs, the end of an agent never returns and holds the whole process."""
    code = """
import os, socket
silent = socket.create_server(("127.0.0.1", 0))
os.environ["NIXL_ETCD_ENDPOINTS"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
os.environ["UCX_MODULES"] = "^ib"
from lmcache_backend_nixl.agent import Agent
Agent("a", "POSIX", {}).close()
silent.setblocking(False)
try:
    silent.accept()
except BlockingIOError:
    print("nobody asked", os.environ["NIXL_ETCD_ENDPOINTS"][:4], flush=True)
os._exit(0)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "nobody asked http\n", ended.stderr
