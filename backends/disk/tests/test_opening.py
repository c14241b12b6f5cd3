"""Taking a folder into use: who may, what is refused in one line, what is cleared away."""

import errno
import os
import signal
import subprocess
import sys

import pytest
from lmcache_backend_disk import DiskBackend, FsBackend
from lmcache_backend_disk.checking import check
from lmcache_backend_disk.config import Direct, DiskConfig, Sync

from lmcache_core.cli import main
from lmcache_core.files import OsFiles
from lmcache_core.spi import ConfigError, Load, LoadStatus, Store, StoreStatus, Unavailable
from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.testing.files import SimDisk

MODES = {"folders": 0o700, "files": 0o600}


def on_real_disk(path, backend=DiskBackend):
    return backend(DiskConfig(path=str(path), fan_out=16), real_context())


def refusal(backend, error=ConfigError):
    with pytest.raises(error) as caught:
        backend.open_blocking()
    message = str(caught.value)
    assert "\n" not in message
    assert message[0].islower() or message.startswith("/")
    return message


def test_parents_are_made_and_nothing_is_readable_by_others(tmp_path, new_rig):
    """Seen in LMCache#2704."""
    backend = on_real_disk(tmp_path / "a" / "b")
    backend.open_blocking()
    for folder, folders, files in os.walk(tmp_path / "a"):
        assert os.stat(folder).st_mode & 0o777 == MODES["folders"], folders
        for name in files:
            assert os.stat(os.path.join(folder, name)).st_mode & 0o777 == MODES["files"]
    backend.close_blocking()


def test_a_link_to_a_folder_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    backend = on_real_disk(tmp_path / "link")
    backend.open_blocking()
    backend.close_blocking()
    assert (tmp_path / "real" / "layout").exists()


def test_path_that_is_or_goes_through_a_file_is_refused(tmp_path, new_rig):
    (tmp_path / "file").write_text("mine")
    assert "not a folder" in refusal(on_real_disk(tmp_path / "file"))
    assert "not a folder" in refusal(on_real_disk(tmp_path / "file" / "below"))
    assert (tmp_path / "file").read_text() == "mine"
    rig = new_rig()
    rig.disk.plant("/kv", b"mine")
    assert "not a folder" in refusal(rig.backend)


def test_path_that_is_a_fifo_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    assert "not a folder" in refusal(on_real_disk(tmp_path / "fifo"))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", ["layout", "lock", "tmp"])
def test_something_else_in_the_place_of_an_own_file_is_refused_at_once(tmp_path, name, make):
    make(tmp_path / name)
    if (name, make) != ("tmp", os.mkdir):
        assert refusal(on_real_disk(tmp_path)).startswith(f"cannot use {tmp_path}")
        assert os.listdir(tmp_path / name) == [] if make is os.mkdir else not os.path.isfile(name)


@pytest.mark.parametrize("direct", [Direct.AUTO, Direct.OFF])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_on_a_real_disk_blocks_nobody_and_stays(tmp_path, new_rig, make, direct):
    backend = DiskBackend(DiskConfig(path=str(tmp_path), fan_out=16, direct=direct), real_context())
    backend.open_blocking()
    path, key = new_rig.path(0, tmp_path), new_rig.key(0)
    make(path)
    before = os.lstat(path)
    assert backend.lookup_blocking([key]) == [None]
    assert backend.load_blocking(Load(key, (memoryview(bytearray(9)),))).status is LoadStatus.MISSED
    assert backend.store_blocking(Store(key, (memoryview(b"value"),))).status is StoreStatus.REFUSED
    assert backend.delete_blocking([key]) == 0
    backend.close_blocking()
    assert check(str(tmp_path), files=OsFiles(), repair=True).foreign == [path]
    assert os.lstat(path).st_ino == before.st_ino
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.parametrize("call", ["status", "open", "list", "mkdir"])
def test_a_stale_handle_at_the_start_may_be_better_the_next_time(new_rig, call):
    rig = new_rig(backend=FsBackend)
    rig.files.fail(call, errno.ESTALE)
    with pytest.raises(OSError, match=r"[Ss]tale"):
        rig.open()
    assert rig.files.open_paths == []
    rig.open().keep(0)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS])
@pytest.mark.parametrize("call", ["mkdir", "open", "list"])
def test_folder_that_cannot_be_used_is_refused(new_rig, call, code):
    rig = new_rig()
    rig.files.fail(call, code)
    assert refusal(rig.backend).startswith("cannot use /kv: ")
    assert rig.files.open_paths == []


def test_system_folder_is_refused(tmp_path):
    assert "cannot use /proc/kv" in refusal(on_real_disk("/proc/kv"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": "kv"}, "not absolute"),
        ({"path": ()}, "no folder"),
        ({"path": ("/a", "/a/")}, "twice"),
        ({"fan_out": 100}, "16, 256 or 4096"),
    ],
)
def test_options_that_cannot_work_are_refused(new_rig, options, said):
    assert said in refusal(new_rig(**options).backend)


def test_no_threads_are_refused_where_they_are_written(tmp_path, capsys):
    change = f"tiers=[{{disk: {{path: {tmp_path}/kv, size: 1MiB, threads: 0}}}}]"
    assert main(["config", "--set", change]) == 2
    assert "tiers.disk: threads must be at least 1" in capsys.readouterr().err


def test_second_owner_is_refused_with_the_pid_of_the_first(new_rig):
    first = new_rig(pid=4711).open()
    first.keep(0)
    second = new_rig(first.disk, pid=4712)
    assert "in use by process 4711" in refusal(second.backend, Unavailable)
    assert second.files.open_paths == []
    assert first.get(0) == first.value(0)
    first.close()
    assert second.open().get(0) == first.value(0)


def test_of_several_paths_none_stays_locked_when_one_is_refused(new_rig):
    first = new_rig(path="/b").open()
    second = new_rig(first.disk, path=("/a", "/b"))
    refusal(second.backend, Unavailable)
    assert second.files.open_paths == []


OWNER = """
import sys, time
from lmcache_backend_disk import DiskBackend
from lmcache_backend_disk.config import DiskConfig
from lmcache_core.testing.contexts import test_context
DiskBackend(DiskConfig(path=sys.argv[1], fan_out=16), test_context()).open_blocking()
print("open", flush=True)
time.sleep(1000)
"""


def test_lock_ends_with_its_process_however_that_ends(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout.readline() == b"open\n"
        mine = on_real_disk(tmp_path)
        assert f"in use by process {owner.pid}" in refusal(mine, Unavailable)
        owner.send_signal(signal.SIGSTOP)
        assert f"in use by process {owner.pid}" in refusal(mine, Unavailable)
        owner.kill()
        owner.wait()
    mine.open_blocking()
    pid, boot = (tmp_path / "lock").read_text().split()
    assert pid == str(os.getpid())
    assert len(boot) == 36
    mine.close_blocking()


def test_remains_of_a_dead_writer_are_removed_and_foreign_things_are_not(new_rig):
    rig = new_rig().open()
    rig.keep(0)
    rig.close()
    mine, foreign = "/kv/tmp/1f-0123456789abcdef-7", "/kv/tmp/notes.txt"
    for path in (mine, foreign):
        rig.disk.plant(path, b"x")
    rig.disk.plant("/kv/tmp/2f-0123456789abcdef-7", kind="folder")
    again = rig.again()
    assert [path for path in rig.disk.walk() if "/tmp/" in path] == [foreign]
    assert again.get(0) == again.value(0)


def test_shared_folder_loses_only_remains_that_are_old_by_the_servers_clock(new_rig):
    now = [1.2e9 - 5000]
    disk = SimDisk(wall=lambda: now[0])
    rig = new_rig(disk, backend=FsBackend).open()
    for age, name in ((4000, "old"), (100, "new")):
        now[0] = 1.2e9 - age
        disk.plant(f"/kv/tmp/1f-0123456789abcdef-{age:x}", name.encode())
        disk.plant(f"/kv/tmp/{name}", b"foreign")
    now[0] = 1.2e9  # the node's own clock says 2023
    rig.again()
    assert [disk.peek(path) for path in disk.walk() if "/tmp/" in path] == [
        b"new",
        b"foreign",
        b"foreign",
    ]


def test_folder_keeps_the_fan_out_it_was_made_with(new_rig, caplog):
    rig = new_rig(fan_out=256).open()
    rig.keep(0)
    rig.close()
    assert rig.again(fan_out=16).get(0) == rig.value(0)
    assert "made with fan_out 256" in caplog.text


def test_folder_of_another_version_is_refused_and_left_alone(new_rig):
    """Seen in Tanguille/cluster#4213."""
    rig = new_rig()
    rig.disk.plant("/kv", kind="folder")
    rig.disk.plant("/kv/layout", b"lmcache disk 2\nfan_out 16\n")
    assert "cannot read" in refusal(rig.backend)
    assert rig.disk.walk() == ["/kv/layout", "/kv/lock"]


def test_direct_transfers_are_tried_before_they_are_used(new_rig, caplog):
    """Seen in LMCache#4364, dynamo#6032, LMCache#1570."""
    assert "set direct to auto" in refusal(new_rig(SimDisk(direct=0), direct=Direct.ON).backend)
    for code in (errno.EINVAL, errno.EOPNOTSUPP):
        for call in ("open", "pwritev", "preadv"):
            if (call, code) == ("open", errno.EOPNOTSUPP):
                continue  # open has another number for it
            rig = new_rig()
            rig.files.fail(call, code, path="-2")  # the second temporary file is the trial
            rig.open().keep(0)
            assert not rig.backend._roots[0].direct
    auto = new_rig(SimDisk(direct=0)).open()
    auto.keep(0)
    assert auto.get(0) == auto.value(0)
    assert "cannot do direct transfers; using the page cache" in caplog.text


def test_opening_twice_in_a_row_changes_nothing(new_rig):
    rig = new_rig(sync=Sync.DURABLE).open()
    before = rig.disk.walk()
    rig.close()
    again = rig.again()
    assert again.disk.walk() == before
