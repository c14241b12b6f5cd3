"""Extents of several sizes share an arena without losing it (LMCache#1285: half the pool free, nothing fits)."""

from __future__ import annotations

import random
from itertools import count

import pytest

from lmcache_core.memory.leases import Held
from lmcache_core.memory.pool import Pool
from lmcache_core.spi import Key, Refusal
from tests.memory.pools import IDENTITY, PAGE, key, keys, make_pool, put

MIB = 1 << 20


def store(pool: Pool, name: Key, nbytes: int) -> bool:
    (answer,) = pool.reserve([(name, nbytes)], "w")
    return isinstance(answer, Held) and pool.commit(answer, IDENTITY)


def wasted(pool: Pool) -> float:
    stock = pool.accounting()
    return (stock.internal + stock.stranded) / stock.capacity


@pytest.mark.parametrize("unit", [PAGE, 40 * PAGE, 60 * PAGE + 100])
def test_three_key_spaces_of_different_extent_sizes_waste_little_under_churn(unit: int) -> None:
    capacity = 64 * MIB if unit < 40 * PAGE else 512 * MIB
    pool = make_pool(capacity)
    chance = random.Random(7)
    numbers = count()
    weights = [7, 3, 1]
    worst = 0.0
    stored = 0
    while stored < 4 * capacity:
        if next(numbers) % 500 == 0:  # the mix of the three changes all the time
            weights = [chance.choice((0, 1, 3, 9)) for _ in range(2)] + [1]
        size = chance.choices((unit, 3 * unit, 7 * unit), weights)[0]
        assert store(pool, key(next(numbers)), size)
        stored += size
        if stored > capacity and chance.random() < 0.02:
            worst = max(worst, wasted(pool))
    pool.check()
    assert 0 < worst <= 0.05


def test_one_model_after_another_gets_the_whole_pool() -> None:
    pool = make_pool(MIB)
    for nbytes in (PAGE, 7 * PAGE, 3 * PAGE, 64 * PAGE, PAGE):
        for number in range(2 * MIB // nbytes):
            assert store(pool, key(number * 1000 + nbytes), nbytes)
        stock = pool.accounting()
        assert stock.clean >= 0.95 * MIB - 64 * PAGE
        pool.check()


def test_every_free_byte_is_worth_an_extent() -> None:
    """Mixed sizes, random frees, then full sizes. Seen in LMCache#1285."""
    pool = make_pool(256 * PAGE)
    chance = random.Random(1)
    names = keys(0, 120)
    for name in names:
        store(pool, name, chance.choice((1, 2, 3, 5)) * PAGE)
    pool.drop(chance.sample(names, 60))
    for number in range(1000, 1008):
        assert store(pool, key(number), 32 * PAGE)
    assert pool.accounting().clean >= 7 * 32 * PAGE, (
        "one may be lost to alignment, not half the pool"
    )
    pool.check()


def test_one_leased_extent_does_not_make_others_leave_for_nothing() -> None:
    pool = make_pool(64 * PAGE)
    put(pool, keys(0, 64))
    pool.lease(keys(0, 64)[::4], "r")
    (answer,) = pool.reserve([(key(100), 8 * PAGE)], "w")
    assert answer is Refusal.FULL
    lost = 64 - pool.accounting().values
    assert 0 < lost <= 16, "no more leaves than twice the size asked for"
    pool.check()


def test_leased_values_are_not_moved_by_another_size() -> None:
    pool = make_pool(64 * PAGE)
    put(pool, keys(0, 64))
    batch = pool.lease(keys(0, 8), "r")
    for number in range(100, 140):
        assert store(pool, key(number), 6 * PAGE)
    for lease in batch:
        assert lease is not None
        assert lease.view == lease.key.digest[:1] * PAGE
    pool.release(batch)
    pool.check()


def test_values_of_many_sizes_fill_the_pool() -> None:
    """Compressed values are all of different lengths."""
    pool = make_pool(4 * MIB)
    chance = random.Random(3)
    for number in range(3000):
        assert store(pool, key(number), chance.randrange(1, 100_000))
    assert wasted(pool) < 0.10
    pool.check()
