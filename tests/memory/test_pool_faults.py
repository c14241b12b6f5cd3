"""What a pool survives: late calls, rights of others, careless policies, passing key spaces and tenants."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lmcache_core.memory.pool import Pool
from lmcache_core.policies.lru import LRU, LRUConfig
from lmcache_core.spi import Refusal
from tests.memory.pools import (
    IDENTITY,
    PAGE,
    content,
    held,
    key,
    keys,
    make_arena,
    make_pool,
    put,
)


def test_closed_pool_grants_nothing_and_shows_nothing_that_comes_late() -> None:
    pool = make_pool(10 * PAGE)
    late = held(pool.reserve([(key(1), PAGE)], "w")[0])
    pool.close()
    pool.frozen = False
    assert not pool.commit(late, IDENTITY)
    assert pool.lengths([key(1)]) == [None]
    assert pool.reserve([(key(2), PAGE)], "w") == [Refusal.UNWANTED]
    pool.check()


def test_rights_of_another_pool_are_not_taken() -> None:
    """Seen in vllm#52234."""
    pool, other = make_pool(4 * PAGE), make_pool(4 * PAGE)
    put(other, [key(1)])
    leases, reservation = other.lease([key(1)], "r"), other.reserve([(key(2), 1)], "w")[0]
    for wrong in (
        lambda: pool.release(leases),
        lambda: pool.release([*leases]),
        lambda: pool.share(leases, "s"),
        lambda: pool.abort(held(reservation)),
        lambda: pool.commit(held(reservation), IDENTITY),
    ):
        with pytest.raises(AssertionError, match="another pool"):
            wrong()
    other.check()


def test_policy_cannot_make_a_leased_value_leave() -> None:
    class Careless(LRU):
        def victim(self, busy: Callable[[int], bool], /) -> int | None:
            return super().victim(lambda slot: False)

    pool = Pool(make_arena(2 * PAGE), Careless(LRUConfig(), 2 * PAGE))
    put(pool, keys(0, 2))
    for lease in pool.lease(keys(0, 2), "r"):
        assert put(pool, [key(5)]) == [False]
        assert lease is not None
        assert lease.view == content(lease.key, PAGE)


def test_broken_policy_leaves_no_value_pinned() -> None:
    class Broken(LRU):
        def admit(self, fingerprint: int, nbytes: int, /) -> bool:
            if fingerprint == broken.index.fingerprint(key(2)):
                raise RuntimeError
            return True

    broken = Pool(make_arena(4 * PAGE), Broken(LRUConfig(), 4 * PAGE))
    put(broken, [key(1)])
    with pytest.raises(RuntimeError):
        broken.reserve([(key(1), 1), (key(3), 1), (key(2), 1)], "w")
    broken.check()
    assert broken.close_owner("w", proof=True) == 0
    assert broken.accounting().reserved == 0


def test_nothing_is_left_of_spaces_and_tenants_without_values() -> None:
    """New weights are a new key space: a loop of them must not fill the memory with empty tables."""
    pool = make_pool(10 * PAGE)
    for epoch in range(20):
        space = b"%032d" % epoch
        names = [key(number, space) for number in range(10)]
        assert all(put(pool, names, tenant=f"tenant {epoch}"))
    assert list(pool.accounting().usage) == ["tenant 19"]
    assert len(pool.index._tables) == 1


def test_tenant_at_its_quota_is_searched_for_once_per_batch() -> None:
    asked = 0

    class Counting(LRU):
        def victim(self, busy: Callable[[int], bool], /) -> int | None:
            nonlocal asked
            asked += 1
            return super().victim(busy)

    pool = Pool(make_arena(9 * PAGE), Counting(LRUConfig(), 9 * PAGE), quotas={"small": PAGE})
    put(pool, keys(0, 8))
    put(pool, [key(8)], tenant="small")
    pool.lease([key(8)], "r")
    answers = pool.reserve([(each, 1) for each in keys(10, 20)], "w", tenant="small")
    assert answers == [Refusal.UNWANTED] * 10
    assert asked == 1
