"""Memory of a pool in the engine's own process is touched before it is used, and not much before."""

from __future__ import annotations

import resource
import sys
import threading

import pytest

from lmcache_core import ops
from lmcache_core.memory.arena import Arena
from lmcache_core.memory.pool import Pool
from lmcache_core.policies.lru import LRU, LRUConfig
from lmcache_core.spi import MemoryOptions
from tests.memory.pools import PAGE, held, key, put

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts page faults")
MIB = 1 << 20
SLICE = 8 * MIB


class Pinned:
    """Pieces touched so far."""

    def __init__(self) -> None:
        self.count = 0
        self._more = threading.Condition()

    def __call__(self, piece: memoryview) -> None:
        with self._more:
            self.count += 1
            self._more.notify_all()

    def wait_for(self, count: int) -> None:
        with self._more:
            assert self._more.wait_for(lambda: self.count >= count, 10)


def make_pool(capacity: int, pinned: Pinned) -> Pool:
    return Pool(Arena(capacity, MemoryOptions(), pin=pinned), LRU(LRUConfig(), capacity))


def test_touching_stays_a_little_ahead_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "populate", lambda view: None)
    pinned = Pinned()
    pool = make_pool(10 * SLICE, pinned)
    pool.touch_ahead(SLICE)
    pinned.wait_for(1)
    put(pool, [key(1)], PAGE)
    pinned.wait_for(2)
    put(pool, [key(2)], 3 * SLICE)
    pinned.wait_for(5)
    (thread,) = pool.arena.touching
    pool.close()
    thread.join(10)
    assert not thread.is_alive()
    assert pinned.count == 5


def test_the_first_store_of_a_process_finds_its_pages_there() -> None:
    pinned = Pinned()
    pool = make_pool(4 * SLICE, pinned)
    pool.touch_ahead(2 * SLICE)
    pinned.wait_for(2)
    content = b"\x01" * SLICE
    reservation = held(pool.reserve([(key(1), SLICE)], "writer")[0])
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    ops.copy(reservation.view, content)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < SLICE // PAGE // 10
    pool.abort(reservation)
    pool.close()


def test_a_waiting_thread_ends_with_its_pool() -> None:
    pinned = Pinned()
    pool = make_pool(4 * SLICE, pinned)
    pool.touch_ahead(SLICE)
    pinned.wait_for(1)
    (thread,) = pool.arena.touching
    pool.close()
    thread.join(10)
    assert not thread.is_alive()
