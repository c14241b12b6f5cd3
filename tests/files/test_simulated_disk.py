"""What only the simulated disk can do: lose power, fill up, hang, fall short."""

import errno
import os
import threading
from itertools import product

import pytest

from lmcache_core.testing.files import SimCrash, SimDisk, SimFiles

CREATE = os.O_CREAT | os.O_EXCL | os.O_RDWR
SEEDS = range(200)


def written(files, path, content, *, sync):
    descriptor = files.open(path, CREATE)
    files.pwritev(descriptor, [memoryview(content)], 0)
    if sync:
        files.sync(descriptor)
    files.close(descriptor)


def synced(files, folder):
    descriptor = files.open(folder, os.O_RDONLY)
    files.sync(descriptor)
    files.close(descriptor)


def survivors(seed, *, sync_file, sync_folder):
    disk = SimDisk(seed)
    files = SimFiles(disk)
    written(files, "/a", b"x" * 2000, sync=sync_file)
    if sync_folder:
        synced(files, "/")
    disk.lose_power()
    return disk.peek("/a") if disk.walk() else None


def test_synced_bytes_under_a_synced_name_survive_every_power_loss():
    assert {survivors(seed, sync_file=True, sync_folder=True) for seed in SEEDS} == {b"x" * 2000}


def test_an_unsynced_name_may_be_lost_but_not_torn():
    assert {survivors(seed, sync_file=True, sync_folder=False) for seed in SEEDS} == {
        b"x" * 2000,
        None,
    }


def test_unsynced_bytes_may_be_lost_torn_or_kept():
    seen = {survivors(seed, sync_file=False, sync_folder=True) for seed in SEEDS}
    assert {b"", b"x" * 2000} < seen
    assert any(found and 0 < found.count(b"x") < 2000 for found in seen)


def test_a_rename_may_be_half_lost():
    seen = set()
    for seed in SEEDS:
        disk = SimDisk(seed)
        files = SimFiles(disk)
        files.mkdir("/from")
        files.mkdir("/to")
        written(files, "/from/a", b"x", sync=True)
        for folder in ("/", "/from"):
            synced(files, folder)
        files.rename("/from/a", "/to/a")
        disk.lose_power()
        seen.add(tuple(disk.walk()))
    assert seen == {(), ("/from/a",), ("/to/a",), ("/from/a", "/to/a")}


def test_a_deleted_file_may_come_back():
    seen = set()
    for seed in SEEDS:
        disk = SimDisk(seed)
        disk.plant("/a", b"x")
        SimFiles(disk).unlink("/a")
        disk.lose_power()
        seen.add(tuple(disk.walk()))
        assert disk.used == 4096 * len(disk.walk())
    assert seen == {(), ("/a",)}


def test_the_end_of_a_process_loses_locks_and_nothing_else():
    disk = SimDisk()
    files, other = SimFiles(disk), SimFiles(disk)
    written(files, "/a", b"x", sync=False)
    assert files.lock(files.open("/a", os.O_RDWR))
    assert not other.lock(descriptor := other.open("/a", os.O_RDWR))
    files.kill()
    assert other.lock(descriptor)
    assert disk.peek("/a") == b"x"
    with pytest.raises(OSError, match="error"):
        files.status("/a")


def test_a_crash_ends_the_process_before_the_chosen_call():
    files = SimFiles()
    files.crash_at = 1
    files.mkdir("/a")
    for path in ("/b", "/c"):
        with pytest.raises(SimCrash):
            files.mkdir(path)
    assert list(files.disk.root.entries) == ["a"]


def test_a_write_cut_off_by_a_crash_is_done_in_part():
    lengths = set()
    for seed in SEEDS:
        files = SimFiles(SimDisk(seed))
        descriptor = files.open("/a", CREATE)
        files.crash_at = files.calls
        with pytest.raises(SimCrash):
            files.pwritev(descriptor, [memoryview(b"x" * 1024)], 0)
        lengths.add(len(files.disk.peek("/a")))
    assert lengths == {0, 512, 1024}


def test_room_ends_and_comes_back():
    disk = SimDisk(capacity=8192)
    files = SimFiles(disk)
    descriptor = files.open("/a", CREATE)
    with pytest.raises(OSError) as caught:
        files.allocate(descriptor, 8193)
    assert caught.value.errno == errno.ENOSPC
    assert files.pwritev(descriptor, [memoryview(bytes(9000))], 0) == 8192
    with pytest.raises(OSError, match="No space"):
        files.pwritev(descriptor, [memoryview(b"x")], 8192)
    files.unlink("/a")
    assert files.free("/") == 0
    files.close(descriptor)
    assert files.free("/") == 8192


def test_a_read_only_disk_refuses_changes_and_serves_reads():
    disk = SimDisk()
    disk.plant("/a", b"x")
    files = SimFiles(disk)
    descriptor = files.open("/a", os.O_RDWR)
    disk.read_only = True
    for change in (
        lambda: files.open("/b", CREATE),
        lambda: files.unlink("/a"),
        lambda: files.rename("/a", "/b"),
        lambda: files.link("/a", "/b"),
        lambda: files.mkdir("/b"),
        lambda: files.truncate(descriptor, 0),
        lambda: files.allocate(descriptor, 1),
        lambda: files.pwritev(descriptor, [memoryview(b"y")], 0),
    ):
        with pytest.raises(OSError) as caught:
            change()
        assert caught.value.errno == errno.EROFS
    into = bytearray(1)
    assert files.preadv(descriptor, [memoryview(into)], 0) == 1
    assert into == b"x"


def test_planned_faults_hit_the_named_call_and_path_as_often_as_asked():
    files = SimFiles()
    files.fail("mkdir", errno.EIO, path="b", times=2)
    files.mkdir("/a")
    for _ in range(2):
        with pytest.raises(OSError, match="/b"):
            files.mkdir("/b")
    files.mkdir("/b")


def test_short_transfers_move_at_least_a_sector():
    for seed in range(50):
        files = SimFiles(SimDisk(seed))
        files.shorten("pwritev")
        files.shorten("preadv")
        descriptor = files.open("/a", CREATE)
        assert files.pwritev(descriptor, [memoryview(bytes(2000))], 0) in (512, 1024, 1536)
        files.pwritev(descriptor, [memoryview(bytes(2000))], 0)
        assert files.preadv(descriptor, [memoryview(bytearray(1024))], 0) == 512


def test_a_hung_call_waits_until_it_is_released():
    files = SimFiles()
    release = files.hang("mkdir")
    thread = threading.Thread(target=files.mkdir, args=("/a",), daemon=True)
    thread.start()
    assert thread.is_alive()
    assert not files.disk.root.entries
    release()
    thread.join(10)
    assert list(files.disk.root.entries) == ["a"]


def test_damage_at_rest_is_one_bit_or_a_lost_tail():
    disk = SimDisk()
    disk.plant("/a", bytes(100))
    disk.flip("/a")
    assert sum(byte.bit_count() for byte in disk.peek("/a")) == 1
    disk.cut("/a", 10)
    assert len(disk.peek("/a")) == 10
    disk.lose_power()
    assert len(disk.peek("/a")) == 10


def test_a_stamp_that_was_not_synced_may_be_lost_with_the_power():
    kept = {True: set(), False: set()}
    for synced, seed in product((True, False), range(20)):
        disk = SimDisk(seed)
        files = SimFiles(disk)
        descriptor = files.open("/a", os.O_CREAT | os.O_RDWR)
        files.sync(descriptor)
        files.sync(files.open("/", os.O_RDONLY))
        files.stamp(descriptor, 5.0)
        if synced:
            files.sync(descriptor)
        files.kill()
        disk.lose_power()
        kept[synced].add(disk.find("/a").modified)
    assert kept == {True: {5.0}, False: {5.0, 1e9}}
