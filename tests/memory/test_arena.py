"""Arenas seen from other processes: readers that check, and clients that attack."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_core import ops
from lmcache_core.memory.arena import Access, Arena, ArenaMap, Segment
from lmcache_core.memory.pool import Pool
from lmcache_core.policies.lru import LRU, LRUConfig
from lmcache_core.spi import Extent, MemoryOptions
from tests.memory.pools import IDENTITY, LAZY, PAGE, held, key, make_arena, put

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd")
MIB = 1 << 20
PUNCH_HOLE, KEEP_SIZE = 2, 1

CLIENT = """
import ctypes, errno, fcntl, json, mmap, os, sys
from lmcache_core.memory.arena import ArenaMap
from lmcache_core.spi import Extent
fd, nbytes, where = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
def tried(attack):
    try:
        attack()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
def answer(value):
    print(json.dumps(value), flush=True)
"""


def client(arena: Arena, code: str, extent: Extent | None = None) -> subprocess.Popen[str]:
    """Start a process that holds the first segment's descriptor and runs ``code`` after ``CLIENT``."""
    segment = arena.segments[0]
    where = [extent.base, extent.nbytes, extent.generation] if extent else []
    command = [sys.executable, "-c", CLIENT + code, str(segment.descriptor), str(segment.nbytes)]
    return subprocess.Popen(
        [*command, json.dumps(where)],
        pass_fds=[segment.descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def finish(process: subprocess.Popen[str]) -> Any:
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    return json.loads(out)


@pytest.fixture
def pool() -> Iterator[Pool]:
    arena = Arena(MIB, LAZY)
    pool = Pool(arena, LRU(LRUConfig(), MIB))
    yield pool
    pool.check()
    pool.close()


ATTACKS = """
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
def punch():
    if libc.fallocate(fd, 3, 0, nbytes):
        raise OSError(ctypes.get_errno(), "fallocate")
def rewrite():
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    os.pwrite(again, b"evil", 0)
def unseal_map():
    mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
def protect():
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
    at = libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(nbytes), 3):
        raise OSError(ctypes.get_errno(), "mprotect")
answer({
    "shrink": tried(lambda: os.ftruncate(fd, 0)),
    "grow": tried(lambda: os.ftruncate(fd, 2 * nbytes)),
    "punch": tried(punch),
    "write": tried(lambda: os.pwrite(fd, b"evil", 0)),
    "reopen and write": tried(rewrite),
    "map for writing": tried(unseal_map),
    "make a map writable": tried(protect),
    "add a seal": tried(lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)),
})
"""


def test_hostile_client_changes_nothing_of_a_sealed_arena(pool: Pool) -> None:
    assert put(pool, [key(1)], 3 * PAGE) == [True]
    (lease,) = pool.lease([key(1)], "reader")
    assert lease is not None
    before = lease.view.tobytes()
    results = finish(client(pool.arena, ATTACKS))
    assert set(results.values()) <= {"EPERM", "EACCES"}, results
    assert lease.view == before
    held(pool.reserve([(key(2), PAGE)], "w")[0]).view[:4] = b"mine"  # the owner still writes
    pool.close_owner("reader", proof=True)
    pool.close_owner("w", proof=True)


def test_shared_arena_cannot_be_shrunk_under_its_owner() -> None:
    arena = Arena(MIB, LAZY, access=Access.SHARED)
    arena.grow()
    results = finish(client(arena, ATTACKS))
    assert results["shrink"] == results["grow"] == results["add a seal"] == "EPERM"
    assert results["map for writing"] == "done"
    arena.close()


def test_engine_that_mapped_before_the_seal_keeps_writing_and_nobody_after() -> None:
    arena = Arena(MIB, LAZY, access=Access.ENGINE)
    segment = arena.grow()
    assert segment is not None
    writer = client(
        arena,
        "view = ArenaMap([(0, nbytes, fd)], writable=True).view(Extent(0, 0, 4, 0))\n"
        "answer('mapped'); sys.stdin.readline(); view[:] = b'kept'; answer('written')",
    )
    assert said(writer) == "mapped"
    segment.seal()
    assert finish(client(arena, ATTACKS))["map for writing"] == "EPERM"
    assert writer.stdin is not None
    writer.stdin.write("go\n")
    writer.stdin.flush()
    assert finish(writer) == "written"
    assert bytes(segment.data[:4]) == b"kept"
    arena.close()


READER = """
extent = Extent(0, *where)
arena = ArenaMap([(0, nbytes, fd)])
into = bytearray(extent.nbytes)
first = arena.copy_checked(extent, into)
answer([first, into.hex()[:8], arena.view(extent).readonly])
sys.stdin.readline()
answer(arena.copy_checked(extent, into))
"""


def test_reader_in_another_process_sees_that_its_value_has_left(pool: Pool) -> None:
    """Seen in vllm#21570."""
    put(pool, [key(1)], PAGE)
    (lease,) = pool.lease([key(1)], "scheduler")
    assert lease is not None
    base = lease.extent.base
    reader = client(pool.arena, READER, lease.extent)
    assert said(reader) == [True, key(1).digest[:1].hex() * 4, True]
    pool.drop([key(1)])
    pool.close_owner("scheduler", proof=True)
    put(pool, [key(2)], PAGE)
    (other,) = pool.lease([key(2)], "scheduler")
    assert other is not None
    assert other.extent.base == base, "the place was to be used again"
    assert reader.stdin is not None
    reader.stdin.write("\n")
    reader.stdin.flush()
    assert finish(reader) is False
    pool.close_owner("scheduler", proof=True)


def test_place_given_away_during_the_copy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen in vllm#21570."""
    arena = Arena(MIB, LAZY)
    segment = arena.grow()
    assert segment is not None
    reader = ArenaMap([(0, segment.nbytes, segment.descriptor)])
    extent = Extent(0, 2 * PAGE, PAGE, segment.generation(2 * PAGE))
    into = bytearray(PAGE)
    assert reader.copy_checked(extent, into)
    plain = ops.copy

    def slow_copy(dst: Any, src: Any) -> None:
        plain(dst, src)
        segment.advance(2 * PAGE)

    monkeypatch.setattr(ops, "copy", slow_copy)
    assert not reader.copy_checked(extent, into)
    reader.close()
    arena.close()


def test_map_refuses_what_could_shrink_or_is_too_short() -> None:
    descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 2 * MIB)
    with pytest.raises(ValueError, match="segment 0 is not sealed memory"):
        ArenaMap([(0, MIB, descriptor)])
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(ValueError, match="segment 7 is not sealed memory"):
        ArenaMap([(7, 2 * MIB, descriptor)])
    ArenaMap([(0, MIB, descriptor)]).close()
    os.close(descriptor)


def test_descriptor_does_not_survive_exec_and_map_not_a_fork() -> None:
    arena = Arena(MIB, LAZY)
    segment = arena.grow()
    assert segment is not None
    assert not os.get_inheritable(segment.descriptor)
    assert smaps_flags(segment.address).count("dc") == 1  # do not copy on fork
    arena.close()


def smaps_flags(address: int) -> list[str]:
    with open("/proc/self/smaps") as file:
        lines = file.read().splitlines()
    here = False
    for line in lines:
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            here = start <= address < end
        elif here and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("not mapped")


def allocated(segment: Segment) -> int:
    return os.fstat(segment.descriptor).st_blocks * 512


def test_memory_exists_before_an_extent_is_named(pool: Pool) -> None:
    """A client that first touched a page would pay for it, or die of it."""
    assert not pool.arena.segments
    (answer,) = pool.reserve([(key(1), 20 * PAGE)], "w")
    (segment,) = pool.arena.segments
    words = segment.nbytes // PAGE * 8
    assert 20 * PAGE + words <= allocated(segment) <= 21 * PAGE + words
    pool.abort(held(answer))


def test_refused_memory_is_never_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = Pool(Arena(MIB, LAZY), LRU(LRUConfig(), MIB))
    put(pool, [key(1)], 10 * PAGE)

    def no_space(descriptor: int, base: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    assert put(pool, [key(2)], 11 * PAGE) == [False]
    assert put(pool, [key(3)], 3 * PAGE) == [True], "the memory it has goes on serving"
    (lease,) = pool.lease([key(3)], "r")
    assert lease is not None
    assert lease.extent.base + 3 * PAGE <= 10 * PAGE
    pool.check()
    assert "pool stays at 40 KiB of 1 MiB" in caplog.text
    pool.close()


def test_populating_happens_while_serving_and_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    started, go_on = threading.Event(), threading.Event()
    pinned: list[int] = []
    plain = ops.populate

    def slow_populate(view: memoryview) -> None:
        started.set()
        assert go_on.wait(10)
        plain(view)

    monkeypatch.setattr(ops, "populate", slow_populate)
    arena = Arena(MIB, MemoryOptions(populate=True), pin=lambda view: pinned.append(view.nbytes))
    pool = Pool(arena, LRU(LRUConfig(), MIB))
    put(pool, [key(1)], 3 * PAGE)
    assert started.wait(10)
    put(pool, [key(2)], 3 * PAGE)
    assert pool.accounting().populated < MIB or not pinned
    go_on.set()
    (thread,) = [t for t in threading.enumerate() if t.name.startswith("lmcache-populate")]
    assert thread.daemon
    thread.join(10)
    assert pool.accounting().populated == sum(pinned) == MIB
    pool.close()


def test_closing_during_population_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow_populate(view: memoryview) -> None:
        started.set()
        assert go_on.wait(10)

    monkeypatch.setattr(ops, "populate", slow_populate)
    arena = Arena(80 * MIB, MemoryOptions(populate=True))
    arena.grow()
    assert started.wait(10)
    arena.close()
    go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("lmcache-populate"):
            thread.join(10)
            assert not thread.is_alive()


def test_views_outlive_the_arena() -> None:
    arena = Arena(MIB, LAZY)
    segment = arena.grow()
    assert segment is not None
    view = arena.view(0, 0, 4)
    view[:] = b"live"
    arena.close()
    arena.close()
    assert bytes(view) == b"live"


def test_address_is_where_the_view_is() -> None:
    arena = make_arena(MIB)
    arena.grow()
    view = arena.view(0, 3 * PAGE, 8)
    view[:] = b"12345678"
    at = arena.segments[0].address
    assert ctypes.string_at(at + 3 * PAGE, 8) == b"12345678"
    assert at % PAGE == 0
    arena.close()


def test_huge_pages_that_are_not_there_cost_one_line(caplog: pytest.LogCaptureFixture) -> None:
    arena = Arena(2 * MIB, MemoryOptions(huge_pages=True, populate=False))
    segment = arena.grow()
    assert segment is not None
    segment.data[:4] = b"fine"
    with open("/proc/meminfo") as file:
        none = "HugePages_Free:        0" in file.read()
    assert ("no huge pages" in caplog.text) == none
    arena.close()


@pytest.mark.parametrize(("node", "complaints"), [(0, 0), (900, 1)])
def test_numa_node_is_a_preference(
    node: int, complaints: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen in deepjavalibrary/djl-serving#2982."""
    arena = Arena(MIB, MemoryOptions(numa_node=node, populate=False))
    segment = arena.grow()
    assert segment is not None
    segment.data[:4] = b"fine"
    assert len(caplog.records) == complaints
    arena.close()


def test_capacity_is_in_pages_and_segments_add_up_to_it() -> None:
    """Seen in LMCache#1909."""
    arena = make_arena(10 * PAGE + 17, segment_nbytes=4 * PAGE)
    assert arena.capacity == 10 * PAGE
    for expected in (4 * PAGE, 4 * PAGE, 2 * PAGE):
        segment = arena.grow()
        assert segment is not None
        assert segment.nbytes == expected
    assert arena.grow() is None
    arena.close()


def test_identity_is_kept_with_the_value(pool: Pool) -> None:
    put(pool, [key(1)])
    (lease,) = pool.lease([key(1)], "r")
    assert lease is not None
    assert lease.identity == IDENTITY
    pool.release([lease])
