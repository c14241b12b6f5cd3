"""The disk tier under the storage manager: what survives a restart, what a full disk does, what a limit means."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from lmcache_backend_disk.config import Direct, DiskConfig, Sync

from lmcache_core.config import Config, ManagerConfig, TierConfig
from lmcache_core.registry import Registry
from lmcache_core.spi import ByteSize, ConfigError, Duration
from lmcache_core.storage import Reason
from lmcache_core.storage.build import build, default_context
from lmcache_core.testing.files import SimDisk, SimFiles
from lmcache_core.testing.worlds import frame_nbytes, key_of, put, served

NBYTES = 50_001
CHUNKS = [key_of(number) for number in range(60)]
MIB = 1 << 20


def config(path, *, size=64 * MIB, plugin="disk", close=10.0, deadline=5.0, **options):
    tier = TierConfig(
        plugin=plugin,
        name=plugin,
        options=DiskConfig(path=str(path), fan_out=16, **options),
        size=ByteSize(size) if size else None,
        deadline=Duration(deadline),
    )
    manager = ManagerConfig(close_timeout=Duration(close), cost_gate=False)
    return Config(tiers=(tier,), manager=manager)


def on(files):
    """Contexts on the given system calls."""
    return lambda name: replace(default_context(name), files=files)


async def stored(manager, keys, nbytes=NBYTES):
    assert all(put(manager, keys, nbytes))
    await manager.flush()


def real_bytes(folder):
    files = [Path(at) / name for at, _, names in os.walk(folder) for name in names]
    return sum(file.stat().st_blocks * 512 for file in files if len(file.name) > 100)


@pytest.mark.parametrize("plugin", ["disk", "fs"])
@pytest.mark.parametrize("options", [{}, {"direct": Direct.OFF, "sync": Sync.NONE}])
def test_every_acknowledged_chunk_hits_after_a_restart(tmp_path, plugin, options):
    """Seen in LMCache#1175."""
    made = config(tmp_path / "kv", plugin=plugin, size=0 if plugin == "fs" else 64 * MIB, **options)

    async def first():
        manager = await build(made, Registry())
        await stored(manager, CHUNKS)
        await manager.aclose()

    async def second():
        manager = await build(made, Registry())
        found = await manager.lookup(CHUNKS)  # at once, before the index is rebuilt
        assert found.leading == len(CHUNKS)
        assert await served(manager, CHUNKS) == (len(CHUNKS), Reason.COMPLETE)
        for tier in manager.tiers:
            await asyncio.wait_for(tier.complete.wait(), 10)
        manager.check()
        await manager.aclose()

    asyncio.run(first())
    asyncio.run(second())


def test_restarts_neither_write_again_nor_grow_the_folder(tmp_path):
    """Seen in LMCache#562, LMCache#2273."""
    made = config(tmp_path / "kv")

    async def boot():
        manager = await build(made, Registry())
        await asyncio.wait_for(manager.tiers[0].complete.wait(), 10)
        await stored(manager, CHUNKS)
        await manager.aclose()
        return {path: path.stat().st_ino for path in (tmp_path / "kv").rglob("?" * 132)}

    first = asyncio.run(boot())
    assert len(first) == len(CHUNKS)
    assert asyncio.run(boot()) == first


def test_limit_holds_in_real_bytes_counting_what_was_there(tmp_path):
    """Seen in LMCache#1454."""
    limit = 20 * 64 * 1024

    async def boot(keys):
        manager = await build(config(tmp_path / "kv", size=limit), Registry())
        for start in range(0, len(keys), 7):
            await stored(manager, keys[start : start + 7])
            assert real_bytes(tmp_path / "kv") <= limit
        await asyncio.wait_for(manager.tiers[0].complete.wait(), 10)
        newest = await served(manager, keys[-7:])
        manager.check()
        await manager.aclose()
        return newest

    for boot_number in range(3):
        keys = [key_of(1000 * boot_number + number) for number in range(35)]
        assert asyncio.run(boot(keys)) == (7, Reason.COMPLETE)
    assert real_bytes(tmp_path / "kv") > limit / 2


def test_limit_below_one_chunk_stores_nothing_and_serves_from_memory(tmp_path, caplog):
    """Seen in LMCache#485."""

    async def main():
        manager = await build(config(tmp_path / "kv", size=4096), Registry())
        await stored(manager, CHUNKS[:4])
        assert real_bytes(tmp_path / "kv") == 0
        await stored(manager, CHUNKS[4:8])
        assert (await served(manager, CHUNKS[:4]))[0] == 4
        manager.check()
        await manager.aclose()

    asyncio.run(main())
    said = [each.getMessage() for each in caplog.records if "too small" in each.getMessage()]
    need = -(-frame_nbytes(NBYTES) // 4096) * 4096 + 512
    assert said == [f"tier disk is too small: a value takes {need} bytes, its limit is 4096"]


@pytest.mark.parametrize("full", [True, False], ids=["full", "read-only"])
def test_a_disk_that_takes_no_more_goes_on_serving(full):
    disk = SimDisk(capacity=30 * 64 * 1024)

    async def main():
        files = SimFiles(disk)
        manager = await build(config("/kv"), Registry(), context=on(files))
        await stored(manager, CHUNKS[:10])
        disk.read_only = not full
        await stored(manager, CHUNKS[10:])  # they are in memory; the disk refuses what does not fit
        await manager.clear(tier="staging")
        count, _ = await served(manager, CHUNKS[:10])
        assert count == 10
        disk.read_only, disk.capacity = False, 1 << 30
        await stored(manager, [key_of(7777)])
        await manager.clear(tier="staging")
        assert await served(manager, [key_of(7777)]) == (1, Reason.COMPLETE)
        manager.check()
        await manager.aclose()

    asyncio.run(main())


def test_damage_at_rest_is_a_miss_once_and_is_repaired_by_the_next_store():
    disk = SimDisk()

    async def main():
        manager = await build(config("/kv"), Registry(), context=on(SimFiles(disk)))
        await stored(manager, CHUNKS[:3])
        await manager.clear(tier="staging")
        (path,) = [path for path in disk.walk() if path.endswith(CHUNKS[1].text)]
        disk.flip(path, 8 * 20_000)
        assert (await served(manager, CHUNKS[:3]))[0] == 1
        for _ in range(100):
            if path not in disk.walk():
                break
            await asyncio.sleep(0.02)
        assert path not in disk.walk()
        await stored(manager, CHUNKS[1:2])
        await manager.clear(tier="staging")
        assert await served(manager, CHUNKS[:3]) == (3, Reason.COMPLETE)
        manager.check()
        await manager.aclose()

    asyncio.run(main())


def test_foreign_files_in_the_folder_are_never_touched(tmp_path):
    folder = tmp_path / "kv"
    mine = [folder / "notes.txt", folder / "0" / "core", folder / "tmp" / "draft"]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")

    async def main():
        manager = await build(config(folder, size=5 * 64 * 1024), Registry())
        for start in range(0, len(CHUNKS), 5):
            await stored(manager, CHUNKS[start : start + 5])
        await manager.clear()
        await manager.aclose()

    asyncio.run(main())
    assert [path.read_text() for path in mine] == ["mine"] * 3


def test_a_path_that_cannot_be_a_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="is not a folder") as caught:
        asyncio.run(build(config(tmp_path / "file"), Registry()))
    assert "\n" not in str(caught.value)


def test_a_folder_in_use_is_named_with_its_owner_and_taken_when_that_ends(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("lmcache_core.storage.tier.REOPEN_S", 0.05)

    async def main():
        first = await build(config(tmp_path / "kv"), Registry())
        await stored(first, CHUNKS[:3])
        second = await build(config(tmp_path / "kv"), Registry())
        assert f"{tmp_path}/kv is in use by process {os.getpid()}" in caplog.text
        assert (await second.lookup(CHUNKS[:3])).leading == 0  # it works, without this tier
        await first.aclose()
        await asyncio.wait_for(second.tiers[0].complete.wait(), 30)
        assert await served(second, CHUNKS[:3]) == (3, Reason.COMPLETE)
        second.check()
        await second.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("given", [{"size": ByteSize(MIB)}, {"quotas": {"default": ByteSize(MIB)}}])
def test_limits_that_a_shared_folder_would_not_keep_are_refused(tmp_path, given):
    made = config(tmp_path / "kv", plugin="fs", size=0)
    made = replace(made, tiers=(replace(made.tiers[0], **given),))
    with pytest.raises(ConfigError, match="tier fs is shared") as caught:
        asyncio.run(build(made, Registry()))
    assert "\n" not in str(caught.value)


HANGING = """
import asyncio, sys, time
from dataclasses import replace
from lmcache_core.registry import Registry
from lmcache_core.storage.build import build, default_context
from lmcache_core.testing.files import SimFiles
from lmcache_core.testing.worlds import key_of, put
sys.path.insert(0, sys.argv[1])
from test_disk_tier import config

async def main():
    files = SimFiles()
    context = lambda name: replace(default_context(name), files=files)
    manager = await build(config("/kv", close=1.0, deadline=0.2), Registry(), context=context)
    keys = [key_of(number) for number in range(3)]
    assert all(put(manager, keys))
    await manager.flush()
    await manager.clear(tier="staging")
    files.hang(sys.argv[2])
    started = time.monotonic()
    loaded = await manager.load(keys, "me")
    print("missed" if not loaded.leases else "served", time.monotonic() - started < 2, flush=True)
    shutdown = await manager.aclose()
    print("closed", bool(shutdown.errors), time.monotonic() - started < 5, flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("call", ["preadv", "open"])
def test_a_process_whose_disk_hangs_misses_and_ends_in_time(call):
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", HANGING, here, call]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert finished.stdout.split() == ["missed", "True", "closed", "True", "True"], finished


def test_frames_on_disk_are_what_check_accepts(tmp_path):
    from lmcache_backend_disk.checking import check

    from lmcache_core.files import OsFiles

    async def main():
        manager = await build(config(tmp_path / "kv"), Registry())
        await stored(manager, CHUNKS)
        await manager.aclose()

    asyncio.run(main())
    report = check(str(tmp_path / "kv"), files=OsFiles(), repair=False)
    assert (report.good, report.nbytes) == (60, 60 * frame_nbytes(NBYTES))
    assert report.clean
