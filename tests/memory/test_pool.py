from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from lmcache_core.memory.leases import Held
from lmcache_core.memory.pool import Pool
from lmcache_core.policies.lru import LRU, LRUConfig
from lmcache_core.spi import Key, Refusal, ResidentPool
from tests.memory.pools import (
    IDENTITY,
    PAGE,
    content,
    held,
    here,
    key,
    keys,
    make_arena,
    make_pool,
    put,
)


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = make_pool(10 * PAGE)
    yield pool
    pool.check()
    pool.close()


def test_pool_is_the_resident_pool_of_the_contract(pool: Pool) -> None:
    resident: ResidentPool = pool
    assert resident.capacity == 10 * PAGE


def test_full_pool_grants_the_longest_fitting_prefix(pool: Pool) -> None:
    """LMCache#3119: pool for 3, prefix of 5."""
    put(pool, keys(0, 7))
    pool.lease(keys(0, 7), "reader")
    answers = pool.reserve([(each, PAGE) for each in keys(10, 15)], "w")
    assert [isinstance(answer, Held) for answer in answers] == [True] * 3 + [False] * 2
    assert answers[3:] == [Refusal.FULL] * 2


def test_nothing_is_granted_after_the_first_that_does_not_fit(pool: Pool) -> None:
    put(pool, keys(0, 8))
    pool.lease(keys(0, 8), "reader")
    answers = pool.reserve([(key(20), PAGE), (key(21), 2 * PAGE), (key(22), PAGE)], "w")
    assert isinstance(answers[0], Held)
    assert answers[1:] == [Refusal.FULL, Refusal.FULL]


def test_pressure_alone_evicts_whatever_the_level(pool: Pool) -> None:
    """LMCache#5290: 18 of 28 resident, 11 wanted."""
    put(pool, keys(0, 6))
    assert all(put(pool, keys(10, 18)))
    assert here(pool, keys(0, 6)) == [True, True, False, False, False, False]


def test_a_chunk_never_evicts_its_own_prefix(pool: Pool) -> None:
    """Seen in inference-sim/inference-sim#649."""
    put(pool, keys(0, 10))
    done = put(pool, keys(0, 12))
    assert done == [False] * 10 + [False] * 2
    assert here(pool, keys(0, 10)) == [True] * 10


def test_leaves_go_before_roots(pool: Pool) -> None:
    put(pool, keys(0, 5))
    put(pool, keys(5, 10))
    pool.release(pool.lease(keys(0, 10), "r"))
    put(pool, keys(20, 23))
    assert here(pool, keys(0, 10)) == [True] * 7 + [False] * 3


def test_reader_keeps_its_bytes_through_eviction_of_everything(pool: Pool) -> None:
    """LMCache#3130: batched eviction ignored references."""
    put(pool, keys(0, 10))
    batch = pool.lease([key(3)], "reader")
    for start in range(100, 200, 5):
        put(pool, keys(start, start + 5))
    (lease,) = batch
    assert lease is not None
    assert lease.view == content(key(3), PAGE)
    assert lease.view.readonly
    assert here(pool, [key(3)]) == [True]
    pool.release(batch)
    with pytest.raises(ValueError, match="has ended"):
        _ = lease.view


def test_capacity_comes_back_after_every_lap(pool: Pool) -> None:
    """LMCache#987: a pool that shrinks to nothing over days.

    Seen in LMCache#3884.
    """
    for lap in range(30):
        done = put(pool, keys(10 * lap, 10 * lap + 10))
        assert all(done)
        pool.release(pool.lease(keys(10 * lap, 10 * lap + 10), "r"))
        pool.check()
    pool.drop(keys(290, 300))
    assert pool.accounting().free == pool.capacity


def test_reservation_is_invisible_until_commit_and_only_one_may_write(pool: Pool) -> None:
    first = held(pool.reserve([(key(1), 100)], "a")[0])
    assert len(first.view) == 100
    assert pool.reserve([(key(1), 100)], "b") == [Refusal.PENDING]
    assert pool.lengths([key(1)]) == [None]
    assert list(pool.lease([key(1)], "r")) == [None]
    assert pool.commit(first, IDENTITY)
    assert pool.lengths([key(1)]) == [100]
    assert pool.reserve([(key(1), 100)], "b") == [Refusal.PRESENT]
    assert not pool.commit(first, IDENTITY), "a second commit does nothing"
    assert pool.lengths([key(1)]) == [100]


def test_aborted_write_is_never_seen_and_the_key_is_writable_again(pool: Pool) -> None:
    """LMCache#5032 and LMCache#3391: a failed write goes straight to removed."""
    first = held(pool.reserve([(key(1), PAGE)], "a")[0])
    pool.abort(first)
    pool.abort(first)
    assert not pool.commit(first, IDENTITY)
    assert pool.lengths([key(1)]) == [None]
    assert put(pool, [key(1)]) == [True]


def test_io_in_flight_keeps_its_memory_until_it_ends(pool: Pool) -> None:
    """LMCache#5263: a time limit gave half-written memory away."""
    slow = held(pool.reserve([(key(1), 8 * PAGE)], "load")[0])
    pool.quarantine(slow)
    pool.quarantine(slow)
    assert pool.accounting().quarantined == 8 * PAGE
    assert put(pool, keys(10, 12)) == [True, True]
    assert put(pool, [key(1)], 3 * PAGE) == [False], "no room: the old memory is not reused"
    slow.view[:] = b"late" * (2 * PAGE)
    assert not pool.commit(slow, IDENTITY)
    assert pool.accounting().quarantined == 0
    assert put(pool, [key(1)], 8 * PAGE) == [True]


def test_dropped_while_leased_is_gone_for_others_and_stays_for_the_reader(pool: Pool) -> None:
    put(pool, [key(1)])
    batch = pool.lease([key(1)], "r")
    assert pool.drop([key(1), key(1), key(2)]) == 1
    assert pool.lengths([key(1)]) == [None]
    assert put(pool, [key(1)], 2 * PAGE) == [True], "a repaired value is accepted at once"
    assert batch[0] is not None
    assert batch[0].extent.nbytes == PAGE
    assert pool.accounting().quarantined == PAGE
    pool.release(batch)
    assert pool.accounting().quarantined == 0
    assert pool.lengths([key(1)]) == [2 * PAGE]


def test_dirty_values_stay_until_written_and_are_capped(pool: Pool) -> None:
    put(pool, keys(0, 4), dirty=True)  # the cap is a quarter: 2.5 pages
    stock = pool.accounting()
    assert (stock.dirty, stock.clean, stock.dirty_refused) == (2 * PAGE, 2 * PAGE, 2)
    put(pool, keys(10, 20))
    assert here(pool, keys(0, 4)) == [False, False, True, True]
    pool.mark_clean([key(2), key(0), key(11)])
    put(pool, keys(30, 40))
    assert here(pool, keys(2, 4)) == [False, True]
    pool.drop(keys(2, 4))
    assert pool.accounting().dirty == 0


def test_arena_full_of_leases_and_dirty_refuses_at_once(pool: Pool) -> None:
    """Seen in sglang#32455."""
    put(pool, keys(0, 2), dirty=True)
    put(pool, keys(2, 10))
    pool.lease(keys(2, 10), "offers")
    assert pool.reserve([(key(50), PAGE)], "w") == [Refusal.FULL]
    pool.mark_clean(keys(0, 2))
    assert put(pool, keys(50, 52)) == [True, True]


def test_clean_reserve_says_how_much_to_write_ahead() -> None:
    pool = make_pool(100 * PAGE, dirty_share=1.0, clean_share=0.05)
    put(pool, keys(0, 98), dirty=True)
    assert pool.accounting().clean_short == 3 * PAGE
    assert pool.short_of_clean
    pool.mark_clean(keys(95, 98))
    assert pool.accounting().clean_short == 0
    assert not pool.short_of_clean
    leases = pool.lease(keys(95, 98), "r")  # leased clean values cannot leave
    assert pool.accounting().clean_short > 0
    assert pool.short_of_clean
    pool.release(leases)
    pool.lease(keys(0, 98), "r")  # dirty ones among them could not anyway
    pool.release(pool.lease(keys(0, 98), "s"))
    pool.mark_clean(keys(0, 50))
    assert pool.short_of_clean
    pool.close_owner("r", proof=True)
    assert not pool.short_of_clean
    pool.check()


def test_want_of_clean_memory_is_told_without_a_walk_over_the_leases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = make_pool(100 * PAGE, dirty_share=1.0, clean_share=0.05)
    monkeypatch.delattr("lmcache_core.memory.pool.take_stock")
    put(pool, keys(0, 90))
    pool.lease(keys(0, 80), "r")
    put(pool, keys(90, 98), dirty=True)
    assert not pool.short_of_clean
    pool.drop(keys(0, 90))
    put(pool, keys(100, 108), dirty=True)
    assert pool.short_of_clean
    pool.check()


def test_tenant_over_its_quota_loses_its_own_values_only() -> None:
    """LMCache#3137: one tenant pushes out all others."""
    pool = make_pool(10 * PAGE, quotas={"greedy": 3 * PAGE}, default_quota=8 * PAGE)
    put(pool, keys(0, 4), tenant="quiet")
    assert all(put(pool, keys(10, 13), tenant="greedy"))
    for start in range(20, 60, 2):
        assert all(put(pool, keys(start, start + 2), tenant="greedy"))
    assert here(pool, keys(0, 4)) == [True] * 4
    assert pool.accounting().usage == {"quiet": 4 * PAGE, "greedy": 3 * PAGE}
    assert pool.reserve([(key(90), 4 * PAGE)], "w", tenant="greedy") == [Refusal.UNWANTED]
    assert pool.reserve([(key(90), 9 * PAGE)], "w", tenant="new") == [Refusal.UNWANTED]
    pool.quotas, pool.default_quota = {"greedy": PAGE}, None
    assert put(pool, [key(91)], tenant="greedy") == [True]
    assert pool.accounting().usage["greedy"] == PAGE
    pool.check()


def test_too_large_is_said_and_evicts_nothing(pool: Pool) -> None:
    """Seen in LMCache#485."""
    put(pool, keys(0, 10))
    assert pool.reserve([(key(50), 11 * PAGE)], "w") == [Refusal.TOO_LARGE]
    assert here(pool, keys(0, 10)) == [True] * 10
    assert put(pool, [key(50)], 10 * PAGE) == [True]


def test_frozen_pool_reads_and_takes_nothing_new(pool: Pool) -> None:
    put(pool, [key(1)])
    pool.frozen = True
    assert pool.reserve([(key(1), 1), (key(2), 1)], "w") == [Refusal.PRESENT, Refusal.UNWANTED]
    assert list(pool.lease([key(1)], "r")) != [None]
    pool.frozen = False
    assert put(pool, [key(2)]) == [True]


def test_expired_values_are_absent_and_make_room() -> None:
    time = [0.0]
    pool = make_pool(10 * PAGE, now=lambda: time[0])
    put(pool, keys(0, 5), expires=10.0)
    put(pool, keys(5, 10))
    batch = pool.lease([key(0)], "r")
    time[0] = 10.0
    assert here(pool, keys(0, 6)) == [False] * 5 + [True]
    assert list(pool.lease([key(1)], "r")) == [None]
    assert batch[0] is not None
    assert batch[0].view == content(key(0), PAGE)
    assert put(pool, [key(1)]) == [True]
    pool.check()


def test_tags_drop_together(pool: Pool) -> None:
    put(pool, keys(0, 2), tags=["user 7", "batch"])
    put(pool, keys(2, 4), tags=["batch"])
    assert pool.drop_tag("user 7") == 2
    assert here(pool, keys(0, 4)) == [False, False, True, True]
    assert pool.drop_tag("batch") == 2
    assert pool.drop_tag("batch") == 0


def test_evictions_are_reported_outside_the_lock() -> None:
    gone: list[tuple[Sequence[Key], int]] = []

    def report(left: Sequence[Key], nbytes: int) -> None:
        assert busy.lengths(left) == [None] * len(left), "the busy can be asked meanwhile"
        gone.append((left, nbytes))

    busy = make_pool(4 * PAGE, on_evict=report)
    put(busy, keys(0, 4), 100)
    put(busy, keys(4, 6), 100)
    busy.drop([key(0)])
    assert gone == [([key(3), key(2)], 2 * PAGE)]


def test_place_of_an_aborted_write_is_another_place_afterwards(pool: Pool) -> None:
    first = held(pool.reserve([(key(1), PAGE)], "a")[0])
    named = first.extent
    pool.abort(first)
    second = held(pool.reserve([(key(2), PAGE)], "a")[0])
    assert second.extent.base == named.base
    assert second.extent.generation != named.generation


def test_policy_is_told_pressure_from_deletion() -> None:
    told: list[bool] = []

    class Recording(LRU):
        def remove(self, slot: int, /, *, evicted: bool = False) -> None:
            told.append(evicted)
            super().remove(slot, evicted=evicted)

    recorded = Pool(make_arena(4 * PAGE), Recording(LRUConfig(), 4 * PAGE))
    put(recorded, keys(0, 4))
    put(recorded, keys(4, 6))
    recorded.drop(keys(5, 6))
    assert told == [True, True, False]


def test_scan_lists_visible_values_once(pool: Pool) -> None:
    put(pool, keys(0, 7), 50)
    pool.reserve([(key(9), 1)], "w")
    first, then = pool.scan(0, 3)
    assert then is not None
    pool.drop([first[0][0]])
    rest, end = pool.scan(then, 100)
    assert end is None
    assert sorted(first + rest) == sorted((each, 50) for each in keys(0, 7))


def test_segments_are_added_when_needed() -> None:
    pool = make_pool(10 * PAGE, segment_nbytes=4 * PAGE)
    put(pool, keys(0, 3))
    assert len(pool.arena.segments) == 1
    put(pool, keys(3, 10))
    assert len(pool.arena.segments) == 3
    assert here(pool, keys(0, 10)) == [True] * 10
    assert pool.reserve([(key(20), 5 * PAGE)], "w") == [Refusal.TOO_LARGE]
    pool.check()


def test_closed_pool_holds_and_takes_nothing(pool: Pool) -> None:
    put(pool, keys(0, 3))
    pool.close()
    pool.close()
    assert here(pool, keys(0, 3)) == [False] * 3
    assert pool.reserve([(key(9), 1)], "w") == [Refusal.UNWANTED]


def test_rights_may_end_after_the_pool(pool: Pool) -> None:
    put(pool, keys(0, 3))
    leases = pool.lease(keys(0, 3), "r")
    reservation = held(pool.reserve([(key(9), PAGE)], "w")[0])
    assert leases[0] is not None
    view = leases[0].view
    pool.close()
    pool.release(leases)
    pool.abort(reservation)
    assert bytes(view) == content(key(0), PAGE), "a view keeps its memory mapped"


def test_threads_share_a_pool_without_a_wrong_byte() -> None:
    pool = make_pool(40 * PAGE)
    failures: list[str] = []

    def work(number: int) -> None:
        for lap in range(150):
            start = (lap * 7 + number * 3) % 60
            put(pool, keys(start, start + 6), owner=number)
            batch = pool.lease(keys(start, start + 6), number)
            for lease in batch:
                if lease is not None and lease.view != content(lease.key, PAGE):
                    failures.append(f"{lease.key}")
            pool.release(batch)
            if lap % 10 == number:
                pool.drop(keys(start, start + 2))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    pool.check()
    assert pool.accounting().leased == 0
