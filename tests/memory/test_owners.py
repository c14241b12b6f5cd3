"""Only release, abort, commit or proof of death give memory back."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lmcache_core.memory.arena import Access, Arena
from lmcache_core.memory.leases import OwnerProcess
from lmcache_core.memory.pool import Pool
from lmcache_core.policies.lru import LRU, LRUConfig
from lmcache_core.spi import Refusal
from tests.memory.pools import (
    IDENTITY,
    LAZY,
    PAGE,
    content,
    held,
    here,
    key,
    keys,
    make_pool,
    put,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="pidfd")

WRITER = """
import sys
from lmcache_core.memory.arena import ArenaMap
from lmcache_core.spi import Extent
fd, nbytes, base, size = map(int, sys.argv[1:])
view = ArenaMap([(0, nbytes, fd)], writable=True).view(Extent(0, base, size, 0))
print("ready", flush=True)
while True:
    view[:] = b"W" * size
    view[0] = 0x57
"""


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = make_pool(16 * PAGE, quarantine_share=0.5)
    yield pool
    pool.check()
    pool.close()


def test_memory_of_a_stopped_writer_is_not_used_again_until_it_is_gone() -> None:
    """Finding: a writer stopped past every deadline resumes and overwrites the next value."""
    arena = Arena(16 * PAGE, LAZY, access=Access.SHARED)
    pool = Pool(arena, LRU(LRUConfig(), arena.capacity), quarantine_share=1.0)
    probe = pool.reserve([(key(0), 4 * PAGE)], "probe")  # the first segment exists from here on
    pool.abort(held(probe[0]))
    (segment,) = arena.segments
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(segment.descriptor), str(segment.nbytes), "0", "16384"],
        pass_fds=[segment.descriptor],
        stdout=subprocess.PIPE,
        text=True,
    )
    owner = OwnerProcess(os.pidfd_open(process.pid), "writer")
    try:
        promised = held(pool.reserve([(key(1), 4 * PAGE)], owner)[0])
        assert promised.extent.base == 0
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        assert not owner.gone(), "stopped is not gone"
        assert pool.close_owner(owner, proof=owner.gone()) == 4 * PAGE
        for round_ in range(100):  # far more than fits: everything else is evicted many times
            put(pool, keys(10 + 8 * round_, 18 + 8 * round_))
        process.send_signal(signal.SIGCONT)
        alive = put(pool, keys(900, 912))
        assert all(alive)
        for lease in pool.lease(keys(900, 912), "reader"):
            assert lease is not None
            assert lease.view == content(lease.key, PAGE)
        pool.close_owner("reader", proof=True)
        assert not pool.commit(promised, IDENTITY) or process.poll() is None
        pool.check()
    finally:
        process.kill()
        select.select([owner], [], [], 10)
        process.communicate()
    assert owner.gone()
    pool.close_owner(owner, proof=owner.gone())
    owner.close()
    owner.close()
    assert owner.gone()
    pool.check()
    assert pool.accounting().quarantined == 0
    pool.close()


def test_reservation_of_a_closed_owner_never_becomes_visible(pool: Pool) -> None:
    reservation = held(pool.reserve([(key(1), PAGE)], "gone")[0])
    assert pool.close_owner("gone", proof=False) == PAGE
    assert pool.accounting().quarantined == PAGE
    other = held(pool.reserve([(key(1), PAGE)], "other")[0])
    assert other.extent != reservation.extent
    assert pool.commit(other, IDENTITY)
    assert not pool.commit(reservation, IDENTITY), "the late commit only ends the quarantine"
    assert pool.accounting().quarantined == 0


def test_lease_of_a_closed_owner_keeps_its_bytes(pool: Pool) -> None:
    put(pool, [key(1)])
    (lease,) = pool.lease([key(1)], "gone")
    assert lease is not None
    assert pool.close_owner("gone", proof=False) == PAGE
    put(pool, keys(10, 40))
    assert lease.view == content(key(1), PAGE)
    pool.drop([key(1)])
    put(pool, keys(50, 80))
    assert lease.view == content(key(1), PAGE)
    pool.release([lease])
    assert pool.accounting().quarantined == 0


def test_owner_over_its_quarantine_cap_gets_nothing_more(pool: Pool) -> None:
    put(pool, [key(99)])
    grants = pool.reserve([(each, PAGE) for each in keys(0, 9)], "stuck")
    pool.close_owner("stuck", proof=False)
    assert pool.reserve([(key(20), PAGE)], "stuck") == [Refusal.UNWANTED]
    assert list(pool.lease([key(99)], "stuck")) == [None]
    (shared,) = pool.share(pool.lease([key(99)], "other"), "stuck")
    assert shared is not None, "what others have leased anyway is shared: it is told so"
    assert put(pool, [key(20)], owner="other") == [True], "others go on"
    for grant in grants[:2]:
        pool.abort(held(grant))
    pool.release([shared])
    (lease,) = pool.lease([key(99)], "stuck")
    assert lease is not None, "back under the cap it is served again"
    pool.close_owner("stuck", proof=True)
    assert pool.accounting().quarantined == 0


def test_proof_of_death_ends_what_was_quarantined_before(pool: Pool) -> None:
    pool.reserve([(key(1), PAGE), (key(2), PAGE)], "rank")
    put(pool, [key(3)])
    pool.lease([key(3)], "rank")
    pool.drop([key(3)])
    assert pool.close_owner("rank", proof=False) == 3 * PAGE
    assert pool.accounting().quarantined == 3 * PAGE
    assert pool.close_owner("rank", proof=True) == 0
    assert pool.accounting().free == pool.capacity


def test_one_of_two_readers_leaving_takes_nothing_from_the_other(pool: Pool) -> None:
    """LMCache#2697: shards of a latent-attention chunk shared by two ranks."""
    put(pool, [key(1)])
    first = pool.lease([key(1)], "rank 0")
    second = pool.share(first, "rank 1")
    pool.drop([key(1)])
    pool.close_owner("rank 0", proof=True)
    (lease,) = second
    assert lease is not None
    put(pool, keys(10, 60))
    assert lease.view == content(key(1), PAGE)
    pool.release(second)
    assert here(pool, [key(1)]) == [False]


def test_end_of_lease_and_end_of_owner_in_any_order_release_once(pool: Pool) -> None:
    """LMCache#2559, LMCache#1130, sglang#40360: double release, order of the hooks."""
    put(pool, keys(0, 3))
    for order in range(4):
        batch = pool.lease(keys(0, 3), "r")
        loans = list(batch)
        if order % 2:
            pool.release(loans[:2])
        pool.close_owner("r", proof=True)
        pool.release(batch)
        pool.release(loans)
        pool.close_owner("r", proof=True)
        pool.check()
        assert pool.accounting().leased == 0


def test_each_lookup_has_its_own_right(pool: Pool) -> None:
    """LMCache#1252: one request looks up twice and finishes once."""
    put(pool, [key(1)])
    first, second = pool.lease([key(1)], "request"), pool.lease([key(1)], "request")
    pool.release(first)
    assert second[0] is not None
    pool.drop([key(1)])
    assert second[0].view == content(key(1), PAGE)
    pool.close_owner("request", proof=True)
    assert pool.accounting().free == pool.capacity


def test_only_a_pidfd_proves_a_death() -> None:
    """A client that sent any readable descriptor would get memory freed that it still writes."""
    with open("/dev/null") as null, pytest.raises(ValueError, match="not a pidfd"):
        OwnerProcess(null.fileno(), "rank 0")
    pidfd = os.pidfd_open(os.getpid())
    owner = OwnerProcess(pidfd)
    os.close(pidfd)
    assert not owner.gone(), "a lost descriptor proves nothing"
