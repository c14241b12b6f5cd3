"""``lmcache check``: every value verified, nothing changed unasked, nothing foreign ever."""

import errno
import io
import json
import os
import sys

import pytest
from lmcache_backend_disk import FsBackend, command
from lmcache_backend_disk.checking import check

from lmcache_core import frame
from lmcache_core.cli import main
from lmcache_core.spi import (
    ConfigError,
    Interior,
    KVSpec,
    SegmentSpec,
    Store,
    StoreStatus,
    Unavailable,
)
from lmcache_core.testing.files import SimDisk, SimFiles

SPEC = KVSpec(
    "bfloat16", 16, 2, 2, 8, Interior.ROWS, tuple(SegmentSpec(i, 0, 2, 1024) for i in range(3))
)
ORPHAN = "tmp/1f-0123456789abcdef-7"


def framed(rig, number):
    payload = memoryview(rig.value(number, SPEC.nbytes))
    header = memoryview(bytearray(frame.header_nbytes(len(SPEC.segments))))
    frame.seal_value(header, payload, rig.key(number), spec=SPEC)
    return header, payload


def fill(rig, count=8):
    for number in range(count):
        stored = rig.backend.store_blocking(Store(rig.key(number), framed(rig, number)))
        assert stored.status is StoreStatus.STORED


def checked(rig, *, repair=False):
    files = SimFiles(rig.disk)
    report = check("/kv", files=files, repair=repair)
    assert files.open_paths == []
    return report


@pytest.fixture
def closed(new_rig):
    """A folder with eight whole values that nobody uses."""
    rig = new_rig().open()
    fill(rig)
    rig.close()
    return rig


def test_whole_values_are_counted(closed):
    report = checked(closed)
    assert (report.good, report.nbytes, report.clean) == (8, 8 * (4096 + SPEC.nbytes), True)
    assert (report.foreign, report.removed) == ([], 0)


def test_each_kind_of_damage_is_named_and_changes_nothing(closed):
    disk = closed.disk
    disk.flip(closed.path(0), 8 * 5000)
    disk.flip(closed.path(1), 8 * 100)
    disk.cut(closed.path(2), 5000)
    disk.cut(closed.path(3), 0)
    whole = disk.peek(closed.path(4))
    disk.plant(closed.path(4), whole + b"x")
    disk.plant(closed.path(5), whole)
    before = disk.walk()
    report = checked(closed)
    assert report.good == 2
    said = [report.damaged[closed.path(number)] for number in range(6)]
    wanted = [
        "of segment 0",
        "header digest",
        "header says",
        "too short",
        "header says",
        "another key",
    ]
    for text, part in zip(said, wanted, strict=True):
        assert part in text
    assert disk.walk() == before
    assert not report.clean


def test_long_values_are_read_whole(new_rig):
    rig = new_rig().open()
    spec = KVSpec(
        "uint8", 256, 1, 0, 0, Interior.PAGE, tuple(SegmentSpec(i, 0, 1, 700_000) for i in range(3))
    )
    header = memoryview(bytearray(frame.header_nbytes(3)))
    for number in (10, 11, 12):
        payload = memoryview(rig.value(number, spec.nbytes))
        frame.seal_value(header, payload, rig.key(number), spec=spec)
        rig.backend.store_blocking(Store(rig.key(number), (header, payload)))
    fill(rig, 5)
    rig.close()
    assert checked(rig).good == 8
    rig.disk.flip(rig.path(11), 8 * (spec.nbytes + 4000))
    rig.disk.cut(rig.path(12), spec.nbytes)
    report = checked(rig)
    assert report.good == 6
    assert "of segment 2" in report.damaged[rig.path(11)]
    assert "header says" in report.damaged[rig.path(12)]


def test_repair_deletes_what_is_damaged_or_orphaned_and_nothing_else(closed):
    disk = closed.disk
    disk.flip(closed.path(0), 8 * 5000)
    disk.plant(f"/kv/{ORPHAN}", b"half a value")
    foreign = ["/kv/notes.txt", "/kv/0/core", "/kv/tmp/other"]
    for path in foreign:
        disk.plant(path, b"mine")
    disk.plant("/kv/1/" + "1" * 132, kind="fifo")
    report = checked(closed, repair=True)
    assert (report.good, report.removed) == (7, 2)
    assert list(report.damaged) == [closed.path(0)]
    assert report.orphaned == [f"/kv/{ORPHAN}"]
    assert sorted(report.foreign) == sorted([*foreign[:2], "/kv/1/" + "1" * 132])
    assert set(foreign) < set(disk.walk())
    after = checked(closed)
    assert (after.good, after.clean) == (7, True)


def test_unreadable_values_are_damaged_and_a_sick_disk_is_an_error(closed):
    files = SimFiles(closed.disk)
    files.fail("preadv", errno.EIO, path=closed.path(0))
    report = check("/kv", files=files, repair=False)
    assert "cannot be read" in report.damaged[closed.path(0)]
    files.fail("list", errno.EIO, path="/kv/3")
    with pytest.raises(OSError, match="error"):
        check("/kv", files=files, repair=False)
    assert files.open_paths == []


def test_folder_in_use_is_refused_with_the_pid(new_rig):
    rig = new_rig(pid=4711).open()
    with pytest.raises(Unavailable, match="in use by process 4711"):
        checked(rig)


def test_shared_folder_is_checked_while_others_use_it(new_rig):
    now = [1.7e9]
    rig = new_rig(SimDisk(wall=lambda: now[0]), backend=FsBackend).open()
    rig.disk.plant(f"/kv/{ORPHAN}", b"old")
    now[0] += 4000
    fill(rig)
    rig.disk.plant("/kv/tmp/2f-0123456789abcdef-1", b"being written")
    report = checked(rig, repair=True)
    assert (report.good, report.orphaned, report.removed) == (8, [f"/kv/{ORPHAN}"], 1)


def test_value_replaced_while_it_was_looked_at_is_not_deleted(closed):
    closed.disk.flip(closed.path(0), 8 * 5000)
    files = SimFiles(closed.disk)
    real = files.preadv

    def read_then_replace(descriptor, views, offset):
        got = real(descriptor, views, offset)
        if closed.path(0) in files.open_paths:
            closed.disk.plant(closed.path(0), b"".join(framed(closed, 0)))
        return got

    files.preadv = read_then_replace
    report = check("/kv", files=files, repair=True)
    assert (list(report.damaged), report.removed) == ([closed.path(0)], 0)
    assert checked(closed).good == 8


@pytest.mark.parametrize("kind", ["file", "folder", "nothing"])
def test_what_is_no_store_is_left_alone(kind):
    disk = SimDisk()
    if kind != "nothing":
        disk.plant("/kv", kind=kind)
    with pytest.raises(ConfigError, match="no folder of a disk or fs tier"):
        check("/kv", files=SimFiles(disk), repair=True)
    assert disk.walk() == (["/kv"] if kind == "file" else [])


def test_read_only_folder_can_be_checked(closed):
    closed.disk.read_only = True
    assert checked(closed).good == 8


@pytest.mark.parametrize("direct", [512, 0])
def test_the_medium_is_read_and_not_what_memory_holds_of_it(closed, direct):
    closed.disk.direct = direct
    files, flags = SimFiles(closed.disk), []
    real = files.open

    def seen(path, given, mode=0o600):
        flags.append(given)
        return real(path, given, mode)

    files.open = seen
    assert check("/kv", files=files, repair=False).good == 8
    assert sum(bool(each & os.O_DIRECT) for each in flags) == (8 if direct else 1)


def test_folder_without_its_temporary_one_is_whole(closed):
    closed.disk.find("/kv").bind("tmp", None)
    report = checked(closed, repair=True)
    assert (report.good, report.clean) == (8, True)
    closed.disk.find("/kv").bind("lock", None)  # as of a shared folder
    assert checked(closed, repair=True).good == 8


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_layout_that_is_no_file_is_refused(kind):
    disk = SimDisk()
    disk.plant("/kv", kind="folder")
    disk.plant("/kv/layout", kind=kind)
    with pytest.raises(ConfigError, match="no regular file"):
        check("/kv", files=SimFiles(disk), repair=True)


def test_what_could_not_be_removed_is_not_counted(closed):
    closed.disk.plant(f"/kv/{ORPHAN}", b"half a value")
    closed.disk.flip(closed.path(0), 8 * 5000)
    closed.disk.read_only = True
    report = checked(closed, repair=True)
    assert (len(report.damaged), report.orphaned, report.removed) == (1, [f"/kv/{ORPHAN}"], 0)


def test_one_sick_folder_does_not_hide_the_others(closed, monkeypatch, capsys):
    class Files(SimFiles):
        def __init__(self):
            super().__init__(closed.disk)
            self.fail("list", errno.EIO, path="/kv/3")

    closed.disk.plant("/well", kind="folder")
    closed.disk.plant("/well/layout", b"lmcache disk 1\nfan_out 16\n")
    closed.disk.plant("/well/tmp", kind="folder")
    closed.disk.plant(f"/well/{ORPHAN}", b"half a value")
    monkeypatch.setattr(command, "OsFiles", Files)
    for paths in (["/kv", "/well"], ["/well", "/kv"]):
        assert main(["check", "--json", *paths]) == 3
        out, err = capsys.readouterr()
        assert json.loads(out).keys() == {"/well"}
        assert err == "/kv: cannot be looked through: input/output error\n"
    assert main(["check", "/nothing", "/well"]) == 2
    assert "/nothing is no folder of a disk or fs tier" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_command_reports_on_standard_output_and_by_its_status(
    tmp_path, new_rig, capsys, monkeypatch
):
    from lmcache_backend_disk import DiskBackend
    from lmcache_backend_disk.config import DiskConfig

    from lmcache_core.testing.contexts import test_context as real_context

    folder = str(tmp_path / "kv")
    backend = DiskBackend(DiskConfig(path=folder, fan_out=16), real_context())
    backend.open_blocking()
    for number in range(3):
        backend.store_blocking(Store(new_rig.key(number), framed(new_rig, number)))
    backend.close_blocking()
    assert main(["check", folder]) == 0
    out, err = capsys.readouterr()
    assert out.split()[-6:] == ["3", str(3 * (4096 + SPEC.nbytes)), "0", "0", "0", "0"]
    assert err == ""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Terminal())
        assert main(["check", folder]) == 0
        assert "100%" in sys.stderr.getvalue()
    assert capsys.readouterr().out == out
    os.truncate(new_rig.path(0, folder), 100)
    assert main(["check", "--json", folder]) == 1
    out, _ = capsys.readouterr()
    assert list(json.loads(out)[folder]["damaged"]) == [new_rig.path(0, folder)]
    assert main(["check", "--repair", folder]) == 1
    assert "damaged: " in capsys.readouterr().err
    assert main(["check", folder]) == 0
    assert main(["check", str(tmp_path / "nothing")]) == 2
    assert main(["check"]) == 2  # memory alone is configured
    capsys.readouterr()
    path = new_rig.path(1, folder)
    os.truncate(path, 1 << 40)  # more than memory holds
    assert main(["check", "--json", folder]) == 1
    report = json.loads(capsys.readouterr().out)[folder]
    assert (report["good"], list(report["damaged"])) == (1, [path])
    assert main(["check", "--repair", folder]) == 1
    capsys.readouterr()
    for name in (b"\xff", b"0/two\nlines", b"tmp/\x1b[2J"):
        (tmp_path / "kv" / os.fsdecode(name)).touch()
    assert main(["check", folder]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines) == [f"foreign: {folder}/0/two\\nlines", f"foreign: {folder}/\\udcff"]
    assert main(["check", "--json", folder]) == 0
    assert len(json.loads(capsys.readouterr().out)[folder]["foreign"]) == 2
    backend = DiskBackend(DiskConfig(path=folder, fan_out=16), real_context())
    backend.open_blocking()
    assert all(path.isprintable() for path in backend._scan(None, 9).foreign)
    assert main(["check", folder]) == 3
    assert f"in use by process {os.getpid()}" in capsys.readouterr().err
    backend.close_blocking()
