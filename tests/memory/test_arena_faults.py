"""What an arena's memory survives: forks, views that outlive it, failures half way, places nobody mapped."""

from __future__ import annotations

import errno
import os
import sys

import pytest

from lmcache_core.memory.arena import Arena, ArenaMap
from lmcache_core.memory.limits import Limit
from lmcache_core.memory.pool import Pool
from lmcache_core.policies.lru import LRU, LRUConfig
from lmcache_core.spi import Extent
from tests.memory.pools import LAZY, PAGE, key, make_arena, put
from tests.memory.test_arena import MIB, smaps_flags

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd")


def test_last_view_unmaps_what_was_closed() -> None:
    arena = Arena(MIB, LAZY)
    assert arena.grow() is not None
    view = arena.view(0, 0, 4)
    at = arena.segments[0].address
    arena.close()
    assert mapped(at)
    del view
    assert not mapped(at), "while the arena itself is still named"


def mapped(address: int) -> bool:
    try:
        smaps_flags(address)
    except AssertionError:
        return False
    return True


def test_fork_gets_a_copy_of_private_memory() -> None:
    arena = make_arena(MIB)
    assert arena.grow() is not None
    view = arena.view(0, 0, 4)
    view[:] = b"good"
    child = os.fork()
    if not child:
        view[:] = b"evil"
        os._exit(0)
    os.waitpid(child, 0)
    assert bytes(view) == b"good"
    arena.close()


def test_segment_that_cannot_be_finished_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_space(descriptor: int, base: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    before = len(os.listdir("/proc/self/fd"))
    assert Arena(MIB, LAZY).grow() is None
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("segment", "base", "nbytes"),
    [(0, -PAGE, PAGE), (0, MIB - PAGE, 2 * PAGE), (0, 8, 8), (3, 0, PAGE), (0, 0, -1), (0, MIB, 1)],
)
def test_place_outside_of_the_map_is_refused(segment: int, base: int, nbytes: int) -> None:
    arena = Arena(MIB, LAZY)
    own = arena.grow()
    assert own is not None
    reader = ArenaMap([(0, own.nbytes, own.descriptor)])
    extent = Extent(segment, base, nbytes, 0)
    for read in (reader.view, reader.current, lambda it: reader.copy_checked(it, bytearray(PAGE))):
        with pytest.raises(ValueError, match="not mapped here"):
            read(extent)
    reader.close()
    arena.close()


def test_memory_that_others_have_taken_is_not_taken_from_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What was free at the start may be gone when the pool grows into it: the kernel would kill, not refuse."""
    left = [Limit(8 * MIB, "somewhere")]
    pool = Pool(Arena(MIB, LAZY, available=lambda: left[0]), LRU(LRUConfig(), MIB))
    assert put(pool, [key(1)], 10 * PAGE) == [True]
    left[0] = Limit(2 * PAGE, "somewhere")
    assert put(pool, [key(2)], 11 * PAGE) == [False]
    assert put(pool, [key(3)], 3 * PAGE) == [True], "the memory it has goes on serving"
    assert "pool stays at 40 KiB of 1 MiB: 8 KiB left (somewhere)" in caplog.text
    pool.check()
    pool.close()
