"""One folder, several nodes: two mounts of a FUSE file system where that can be had, else one folder twice."""

import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from lmcache_backend_disk import FsBackend
from lmcache_backend_disk.config import Direct, DiskConfig, Sync

from lmcache_core.spi import PRESENT, Load, LoadStatus, Store, StoreStatus, Unavailable
from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.testing.files import SimDisk

BINDFS = shutil.which("bindfs")


def mounted(source, target):
    """Mirror a folder through a FUSE process; None where that is not possible."""
    target.mkdir()
    if BINDFS is None or os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        return None
    process = subprocess.Popen(
        [BINDFS, "-f", str(source), str(target)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for _ in range(3000):
        if os.path.ismount(target):
            return process
        if process.poll() is not None:
            return None
        subprocess.run(["sleep", "0.01"], check=True)
    process.kill()
    return None


def unmount(process, target):
    if process is not None:
        process.send_signal(signal.SIGCONT)
        subprocess.run(["umount", "-l", str(target)], check=True)
        process.wait(10)


@pytest.fixture
def nodes(tmp_path):
    """Two backends of two nodes on one folder."""
    source = tmp_path / "export"
    source.mkdir()
    targets = [tmp_path / "node1", tmp_path / "node2"]
    processes = [mounted(source, target) for target in targets]
    backends = []
    for seed, (process, target) in enumerate(zip(processes, targets, strict=True)):
        folder = target if process is not None else source
        config = DiskConfig(path=f"{folder}/kv", fan_out=16)
        backends.append(FsBackend(config, real_context(random=random.Random(seed))))
        backends[-1].open_blocking()
    yield backends
    for backend, process, target in zip(backends, processes, targets, strict=True):
        backend.close_blocking()
        unmount(process, target)


def store(backend, rig, number, nbytes=5000):
    value = memoryview(rig.value(number, nbytes))
    return backend.store_blocking(Store(rig.key(number), (value,)))


def load(backend, rig, number, nbytes=5000):
    buffer = bytearray(nbytes)
    loaded = backend.load_blocking(Load(rig.key(number), (memoryview(buffer),)))
    return loaded, buffer


def test_what_one_node_stores_the_other_serves(nodes, new_rig):
    one, two = nodes
    assert two.lookup_blocking([new_rig.key(0)]) == [None]
    assert store(one, new_rig, 0).status is StoreStatus.STORED
    loaded, buffer = load(two, new_rig, 0)
    assert loaded.nbytes == 5000
    assert buffer == new_rig.value(0)
    assert store(two, new_rig, 0) == PRESENT


def test_what_one_node_deletes_is_a_miss_for_the_other_and_can_be_stored_again(nodes, new_rig):
    one, two = nodes
    store(one, new_rig, 0)
    (found,) = two.lookup_blocking([new_rig.key(0)])
    assert (found.nbytes, found.promise) == (5000, False)
    assert two.delete_blocking([new_rig.key(0)]) == 1
    assert load(one, new_rig, 0)[0].status is LoadStatus.MISSED
    assert store(one, new_rig, 0).status is StoreStatus.STORED
    assert load(two, new_rig, 0)[1] == new_rig.value(0)


def test_both_nodes_storing_the_same_keys_leave_one_whole_value_each(nodes, new_rig):
    one, two = nodes
    statuses = [
        [store(node, new_rig, number).status for node in order]
        for number, order in zip(range(20), itertools.cycle([(one, two), (two, one)]))
    ]
    assert statuses == [[StoreStatus.STORED, StoreStatus.PRESENT]] * 20
    for node in nodes:
        for number in range(20):
            assert load(node, new_rig, number)[1] == new_rig.value(number)


SWARM = """
import random, sys
from lmcache_backend_disk import FsBackend
from lmcache_backend_disk.config import DiskConfig
from lmcache_core.spi import Key, Load, LoadStatus, Store, StoreStatus
from lmcache_core.testing.contexts import test_context
folder, seed = sys.argv[1], int(sys.argv[2])
source = random.Random(seed)
store = FsBackend(DiskConfig(path=folder, fan_out=16), test_context(random=random.Random(0)))
store.open_blocking()
for _ in range(600):
    number = source.randrange(20)
    key = Key(bytes(32), bytes([number]) * 32, 0)
    value = random.Random(number).randbytes(1000 * number + 1)
    verb = source.choice(["store", "load", "load", "delete"])
    if verb == "store":
        status = store.store_blocking(Store(key, (memoryview(value),))).status
        assert status in (StoreStatus.STORED, StoreStatus.PRESENT), status
    elif verb == "load":
        buffer = bytearray(len(value))
        loaded = store.load_blocking(Load(key, (memoryview(buffer),)))
        assert loaded.status is LoadStatus.MISSED or buffer == value, (number, loaded)
    else:
        store.delete_blocking([key])
"""


@pytest.mark.slow
def test_processes_storing_loading_and_deleting_at_once_never_see_a_part(tmp_path):
    # All draw the same identity for their temporary files: the worst case.
    """Seen in LMCache#2517."""
    swarm = [
        subprocess.Popen([sys.executable, "-c", SWARM, str(tmp_path), str(seed)])
        for seed in range(3)
    ]
    assert [process.wait(60) for process in swarm] == [0, 0, 0]
    assert os.listdir(tmp_path / "tmp") == []


def test_name_that_another_node_frees_meanwhile_is_taken(new_rig):
    rig = new_rig(backend=FsBackend).open()
    rig.files.fail("link", errno.EEXIST)  # there, says the server; gone, when one looks
    rig.keep(0)
    assert rig.get(0) == rig.value(0)
    rig.files.fail("link", errno.EEXIST, times=100)
    assert rig.store(1).status is StoreStatus.REFUSED


def test_stale_handles_are_tried_again_and_then_missed(new_rig):
    rig = new_rig(backend=FsBackend).open()
    rig.keep(0)
    rig.files.fail("preadv", errno.ESTALE)
    assert rig.get(0) == rig.value(0)
    rig.files.fail("open", errno.ESTALE, path=rig.path(0))
    assert rig.get(0) == rig.value(0)
    rig.files.fail("preadv", errno.ESTALE, times=100)
    assert rig.load(0)[0].status is LoadStatus.MISSED
    rig.files.fail("status", errno.ESTALE)
    assert rig.lookup(0) == [None]
    rig.files.fail("unlink", errno.ESTALE)
    assert rig.delete(0) == 0


def test_a_file_that_goes_while_it_is_read_is_read_to_its_end(new_rig):
    rig = new_rig(backend=FsBackend).open()
    other = new_rig(rig.disk, backend=FsBackend, seed=1).open()
    rig.keep(0)
    real = rig.files.status_of

    def status_then_gone(descriptor):
        other.delete(0)
        return real(descriptor)

    rig.files.status_of = status_then_gone
    loaded, buffer = rig.load(0)
    assert (loaded.nbytes, buffer) == (5000, rig.value(0))


def test_scan_passes_over_what_others_delete_meanwhile(new_rig):
    rig = new_rig(backend=FsBackend).open()
    other = new_rig(rig.disk, backend=FsBackend, seed=1).open()
    rig.keep(*range(20))
    page = rig.backend._scan(None, 5)
    left = [number for number in range(20) if rig.key(number) not in dict(page.values)]
    other.delete(*left)
    assert rig.backend._scan(page.after, 100).values == []


def test_a_temporary_file_taken_away_by_another_node_fails_that_store_only(new_rig):
    rig = new_rig(backend=FsBackend).open()
    real = rig.files.link

    def link_too_late(source, target):
        rig.files.link = real
        rig.files.unlink(source)
        real(source, target)

    rig.files.link = link_too_late
    assert isinstance(rig.store(0).error, Unavailable)
    rig.keep(0)


def test_without_links_and_direct_transfers_the_promises_are_the_same(new_rig):
    rig = new_rig(SimDisk(links=False, direct=0), backend=FsBackend, sync=Sync.DURABLE).open()
    rig.keep(*range(5))
    assert rig.store(0) == PRESENT
    rig.disk.lose_power()
    again = rig.again(direct=Direct.OFF)
    assert all(again.get(number) == again.value(number) for number in range(5))


@pytest.mark.slow
def test_a_stopped_mount_holds_nobody_but_its_own_calls(tmp_path, new_rig):
    source, target = tmp_path / "export", tmp_path / "node"
    source.mkdir()
    process = mounted(source, target)
    if process is None:
        pytest.skip("needs root, /dev/fuse and bindfs")
    script = Path(__file__).with_name("hanging.py")
    try:
        command = [sys.executable, str(script), "mount", f"{target}/kv", str(process.pid)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        resumed = threading.Event()
        resume = threading.Timer(60, lambda: (resumed.set(), process.send_signal(signal.SIGCONT)))
        resume.start()  # a process in a call that the mount has taken ends with that call only
        said, _ = child.communicate()
        resume.cancel()
        assert said.split() == ["opened", "timeout", "exit"]
        assert not resumed.is_set(), "the process did not end while the mount was stopped"
    finally:
        unmount(process, target)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["status", "preadv", "pwritev", "sync"])
def test_a_hung_disk_does_not_keep_the_process(call):
    """Seen in LMCache#265."""
    script = Path(__file__).with_name("hanging.py")
    command = [sys.executable, str(script), "simulated", call]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert finished.stdout.split() == ["opened", "timeout", "exit"], finished
