"""The operating system's files and the simulated ones give the same answers."""

import errno
import os

import pytest

from lmcache_core.files import OsFiles
from lmcache_core.testing.files import SimDisk, SimFiles

CREATE = os.O_CREAT | os.O_EXCL | os.O_RDWR


@pytest.fixture(params=["os", "simulated"])
def place(request, tmp_path):
    """Files and an empty folder."""
    if request.param == "os":
        return OsFiles(), str(tmp_path)
    files = SimFiles(SimDisk())
    files.mkdir("/folder")
    return files, "/folder"


def refusal(call, *args):
    with pytest.raises(OSError) as caught:
        call(*args)
    return caught.value.errno


def write(files, path, *parts):
    descriptor = files.open(path, CREATE)
    assert files.pwritev(descriptor, [memoryview(part) for part in parts], 0) == sum(
        map(len, parts)
    )
    files.close(descriptor)


def read(files, path, nbytes, offset=0):
    into = bytearray(nbytes)
    descriptor = files.open(path, os.O_RDONLY)
    try:
        return bytes(into[: files.preadv(descriptor, [memoryview(into)], offset)])
    finally:
        files.close(descriptor)


def test_bytes_come_back_from_several_views(place):
    files, folder = place
    write(files, f"{folder}/a", b"one", b"two")
    into = bytearray(4), bytearray(4)
    descriptor = files.open(f"{folder}/a", os.O_RDONLY)
    assert files.preadv(descriptor, [memoryview(view) for view in into], 1) == 5
    files.close(descriptor)
    assert into == (bytearray(b"netw"), bytearray(b"o\0\0\0"))


def test_reading_past_the_end_gives_nothing(place):
    files, folder = place
    write(files, f"{folder}/a", b"one")
    assert read(files, f"{folder}/a", 10, 3) == b""
    assert read(files, f"{folder}/a", 10, 2) == b"e"


def test_truncate_sets_the_length_both_ways(place):
    files, folder = place
    write(files, f"{folder}/a", b"12345678")
    descriptor = files.open(f"{folder}/a", os.O_RDWR)
    files.truncate(descriptor, 3)
    files.truncate(descriptor, 5)
    assert files.status_of(descriptor).nbytes == 5
    files.close(descriptor)
    assert read(files, f"{folder}/a", 9) == b"123\0\0"


def test_allocation_takes_blocks_and_leaves_the_length_alone(place):
    files, folder = place
    descriptor = files.open(f"{folder}/a", CREATE)
    files.allocate(descriptor, 0)
    files.allocate(descriptor, 10_000)
    found = files.status_of(descriptor)
    files.close(descriptor)
    assert (found.nbytes, found.allocated) == (0, 12_288)
    assert files.free(folder) > 0


def test_status_tells_files_from_folders(place):
    files, folder = place
    write(files, f"{folder}/a", b"one")
    files.mkdir(f"{folder}/b")
    a, b = files.status(f"{folder}/a"), files.status(f"{folder}/b")
    assert (a.is_file, a.is_folder, a.nbytes) == (True, False, 3)
    assert (b.is_file, b.is_folder) == (False, True)
    assert a.inode != b.inode
    assert sorted(files.list(folder)) == ["a", "b"]


def test_a_link_is_a_second_name_and_never_replaces(place):
    files, folder = place
    write(files, f"{folder}/a", b"one")
    write(files, f"{folder}/b", b"two")
    assert refusal(files.link, f"{folder}/a", f"{folder}/b") == errno.EEXIST
    files.link(f"{folder}/a", f"{folder}/c")
    files.unlink(f"{folder}/a")
    assert read(files, f"{folder}/c", 3) == b"one"


def test_a_rename_replaces(place):
    files, folder = place
    write(files, f"{folder}/a", b"one")
    write(files, f"{folder}/b", b"two")
    files.rename(f"{folder}/a", f"{folder}/b")
    assert read(files, f"{folder}/b", 3) == b"one"
    assert files.list(folder) == ["b"]


def test_an_open_file_outlives_its_name(place):
    files, folder = place
    write(files, f"{folder}/a", b"one")
    descriptor = files.open(f"{folder}/a", os.O_RDONLY)
    files.unlink(f"{folder}/a")
    into = bytearray(3)
    assert files.preadv(descriptor, [memoryview(into)], 0) == 3
    files.close(descriptor)
    assert into == b"one"


def test_errors_carry_the_same_numbers(place):
    files, folder = place
    write(files, f"{folder}/a", b"one")
    assert refusal(files.open, f"{folder}/a", CREATE) == errno.EEXIST
    assert refusal(files.open, f"{folder}/b", os.O_RDONLY) == errno.ENOENT
    assert refusal(files.open, f"{folder}/b/c", CREATE) == errno.ENOENT
    assert refusal(files.open, f"{folder}/a/c", os.O_RDONLY) == errno.ENOTDIR
    assert refusal(files.open, folder, os.O_WRONLY) == errno.EISDIR
    assert refusal(files.unlink, f"{folder}/b") == errno.ENOENT
    assert refusal(files.unlink, folder) == errno.EISDIR
    assert refusal(files.mkdir, folder) == errno.EEXIST
    assert refusal(files.list, f"{folder}/a") == errno.ENOTDIR
    assert refusal(files.status, f"{folder}/b") == errno.ENOENT
    assert refusal(files.rename, f"{folder}/b", f"{folder}/c") == errno.ENOENT
    assert refusal(files.close, 9_999) == errno.EBADF


def test_a_folder_and_a_file_can_be_synced(place):
    files, folder = place
    write(files, f"{folder}/a", b"one")
    for path in (folder, f"{folder}/a"):
        descriptor = files.open(path, os.O_RDONLY)
        files.sync(descriptor)
        files.close(descriptor)


def test_a_lock_excludes_until_its_descriptor_is_closed(place):
    files, folder = place
    write(files, f"{folder}/lock", b"")
    first, second = (files.open(f"{folder}/lock", os.O_RDWR) for _ in range(2))
    assert files.lock(first)
    assert files.lock(first)
    assert not files.lock(second)
    files.close(first)
    assert files.lock(second)
    files.close(second)


def test_direct_transfers_must_be_aligned(place):
    """Seen in dynamo#4508."""
    files, folder = place
    path = f"{folder}/a"
    write(files, path, bytes(8192))
    try:
        descriptor = files.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError:
        pytest.skip("this file system refuses O_DIRECT")
    unaligned = memoryview(bytearray(4096))[1:513]
    if files.status(folder).allocated:  # tmpfs takes anything
        assert refusal(files.pwritev, descriptor, [unaligned[:100]], 0) == errno.EINVAL
        assert refusal(files.preadv, descriptor, [unaligned], 100) == errno.EINVAL
    files.close(descriptor)


def test_a_stamp_is_the_modification_time_until_the_next_change(place):
    files, folder = place
    path = f"{folder}/a"
    descriptor = files.open(path, CREATE)
    files.pwritev(descriptor, [memoryview(b"one")], 0)
    files.stamp(descriptor, 2e8 + 0.5)
    files.sync(descriptor)
    assert files.status(path).modified == files.status_of(descriptor).modified == 2e8 + 0.5
    files.pwritev(descriptor, [memoryview(b"two")], 0)
    assert files.status(path).modified > 2e8 + 1
    files.close(descriptor)


def test_a_stamp_is_synced_and_plain_bytes_do_not_pay_for_that(tmp_path, monkeypatch):
    files, made = OsFiles(), []
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda descriptor, name=name: made.append(name))
    descriptor = files.open(str(tmp_path / "a"), CREATE)
    files.pwritev(descriptor, [memoryview(b"one")], 0)
    files.sync(descriptor)
    files.stamp(descriptor, 2e8)
    files.sync(descriptor)
    files.close(descriptor)
    assert made == ["fdatasync", "fsync"]
