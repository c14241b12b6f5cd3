"""Carrying values down: what is written when, what is charged, and who never waits."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from lmcache_core.config import WritePolicy
from lmcache_core.spi import ConfigError, Refusal, Unavailable
from lmcache_core.storage import Outcome, Reason
from lmcache_core.testing.contexts import simulated_context
from lmcache_core.testing.fakes import Flaky, Recording
from lmcache_core.testing.simulation import run_simulated
from lmcache_core.testing.worlds import (
    PAGE,
    Late,
    frame_nbytes,
    key_of,
    make_manager,
    make_memory,
    make_tier,
    put,
    verify_lease,
)

KEYS = [key_of(i) for i in range(8)]
FRAME = frame_nbytes(PAGE)


def run(body, *tiers, **settings):
    async def main():
        made = [tier() if callable(tier) else tier for tier in tiers]
        manager = make_manager(made, **settings)
        await manager.open()
        await body(manager, *made)
        manager.check()
        await manager.aclose()

    run_simulated(main())


def there(tier, keys=KEYS):
    return [slot >= 0 for slot in tier.holdings.find(keys, tier.context.clock.now())]


def test_a_committed_value_is_visible_before_it_is_written():
    """Seen in sglang#39747."""

    async def body(manager, tier):
        assert all(put(manager, KEYS))
        assert None not in manager.lookup_resident(KEYS)
        assert not any(there(tier))
        assert manager.pool.accounting().dirty == len(KEYS) * FRAME
        assert await manager.flush()
        assert all(there(tier))
        assert manager.pool.accounting().dirty == 0

    run(body, lambda: make_tier(seconds=0.1))


def test_store_waits_for_write_through_and_not_for_write_back():
    async def body(manager, through, back):
        outcomes = await manager.store([(KEYS[0], memoryview(b"payload"))])
        assert outcomes == [Outcome.STORED]
        assert there(through, KEYS[:1]) == [True]
        assert there(back, KEYS[:1]) == [False]
        room = memoryview(bytearray(7))
        assert await manager.load_into(KEYS[:1], [room]) == 1
        assert bytes(room) == b"payload"
        assert await manager.store([(KEYS[0], memoryview(b"payload"))]) == [Outcome.PRESENT]

    run(
        body,
        lambda: make_tier("a", seconds=0.1),
        lambda: make_tier("b", seconds=5.0, write=WritePolicy.BACK, deadline=10.0),
    )


def test_dirty_values_are_not_evicted_and_the_cap_is_counted():
    """Seen in Mooncake#1195."""

    async def body(manager, tier):
        assert sum(put(manager, KEYS)) == 8
        stock = manager.pool.accounting()
        assert stock.dirty == 4 * FRAME  # a quarter of 16 frames
        more = [key_of(100 + i) for i in range(30)]
        for key in more:
            put(manager, [key])
        assert manager.pool.accounting().dirty == 4 * FRAME
        assert None not in manager.lookup_resident(KEYS[:4])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        skipped = manager.metrics.snapshot().total(
            "lmcache_tier_write_back_skipped_total", tier="disk", reason="dirty cap"
        )
        assert skipped > 0

    run(body, lambda: make_tier(seconds=50.0, deadline=100.0), capacity=16 * FRAME)


def test_reserve_never_waits_and_a_slow_tier_refuses_only_itself():
    """Seen in LMCache#2951, LMCache#969."""

    async def body(manager, tier):
        begun = manager.context.clock.now()
        for number in range(100):
            put(manager, [key_of(number)])
        assert manager.context.clock.now() == begun
        assert manager.lookup_resident([key_of(99)]) != [None]

    run(body, lambda: make_tier(seconds=100.0), capacity=16 * FRAME)


def test_on_evict_writes_ahead_of_eviction_oldest_first():
    context = simulated_context(tier="disk")
    recording = Recording(context, make_memory(context))

    async def body(manager, tier):
        put(manager, KEYS[:3])
        await asyncio.sleep(10)
        assert not recording.calls, "written without need"
        for number in range(200, 240):
            put(manager, [key_of(number)])
            await asyncio.sleep(0.1)
        stores = [call for call in recording.calls if call.verb == "store"]
        assert stores[0].keys[0] in KEYS[:3]
        gone = [
            k for k, n in zip(KEYS[:3], manager.lookup_resident(KEYS[:3]), strict=True) if n is None
        ]
        assert gone, "nothing was evicted"
        loaded = await manager.load(gone, "me")
        assert loaded.reason is Reason.COMPLETE
        for lease in loaded.leases:
            verify_lease(lease)
        manager.release(loaded.leases)

    tier = make_tier(backend=recording, context=context, write=WritePolicy.ON_EVICT)
    run(body, tier, capacity=16 * FRAME)


def test_a_second_touch_tier_gets_only_what_was_asked_for_again():
    async def body(manager, tier):
        put(manager, KEYS)
        await manager.flush()
        assert not any(there(tier))
        manager.release(manager.lease(KEYS[2:4], "me"))
        await asyncio.sleep(0.1)
        await manager.flush()
        assert there(tier) == [at in (2, 3) for at in range(8)]

    run(body, lambda: make_tier(after_touches=2))


def test_the_limit_is_charged_before_writing_and_counts_padding():
    """Seen in LMCache#4664."""
    context = simulated_context(tier="disk")
    memory = make_memory(context)

    class Padded(Recording):
        def footprint(self, nbytes):
            return -(-nbytes // 5000) * 5000

    async def body(manager, tier):
        for key in KEYS:
            put(manager, [key])
            await manager.flush()
            assert tier.holdings.used <= tier.limit
        assert sum(there(tier)) == 3
        assert len(memory._values) == 3
        assert there(tier, KEYS[-3:]) == [True] * 3

    padded = Padded(context, memory)
    run(body, make_tier(backend=padded, context=context, size=3 * 10_000 + 9_999))


def test_the_last_chunks_of_a_prefix_leave_first():
    """Seen in LMCache#955."""

    async def body(manager, tier):
        put(manager, KEYS[:4])
        await manager.flush()
        put(manager, [key_of(50)])
        await manager.flush()
        assert there(tier, KEYS[:4]) == [True, True, True, False]

    run(body, lambda: make_tier(size=4 * FRAME))


def test_a_tenant_over_its_quota_pays_itself():
    async def body(manager, tier):
        put(manager, KEYS[:2], tenant="a")
        put(manager, [key_of(70)], tenant="b")
        await manager.flush()
        for key in KEYS[2:6]:
            put(manager, [key], tenant="a")
            await manager.flush()
        assert tier.holdings.tenants() == {"a": 2 * FRAME, "b": FRAME}
        assert there(tier, [key_of(70)]) == [True]

    tier = make_tier(size=10 * FRAME)
    tier._quota = lambda tenant, limit: 2 * FRAME if tenant == "a" else None
    run(body, tier)


def test_values_in_use_are_not_evicted():
    async def body(manager, tier):
        put(manager, KEYS[:2])
        await manager.flush()
        manager.pool.drop(KEYS[:2])
        loading = asyncio.create_task(manager.load(KEYS[:2], "me"))
        await asyncio.sleep(0.05)
        put(manager, [key_of(80)])
        loaded = await loading
        assert loaded.reason is Reason.COMPLETE
        manager.release(loaded.leases)

    run(body, lambda: make_tier(size=2 * FRAME, seconds=0.1))


def test_a_store_that_failed_is_tried_again():
    context = simulated_context(tier="disk")
    flaky = Flaky(context, make_memory(context))

    async def body(manager, tier):
        flaky.failures = [Unavailable("blip"), None, None]
        put(manager, KEYS[:1])
        assert await manager.flush()
        assert there(tier, KEYS[:1]) == [True]

    run(body, make_tier(backend=flaky, context=context))


def test_a_store_with_a_lost_answer_stays_charged_until_it_is_undone():
    context = simulated_context(tier="disk")
    memory = make_memory(context)
    late = Late(context, memory)

    async def body(manager, tier):
        late.seconds = 60.0  # longer than ten times the deadline
        put(manager, KEYS[:1])
        await asyncio.sleep(20)
        assert tier.holdings.used == FRAME
        assert there(tier, KEYS[:1]) == [False]
        await asyncio.sleep(100)
        assert tier.holdings.used == 0
        assert not memory._values

    run(body, make_tier(backend=late, context=context))


def test_nothing_is_accepted_or_written_while_frozen():
    async def body(manager, tier):
        put(manager, KEYS[:1])
        manager.freeze()
        grants = manager.reserve([(KEYS[0], FRAME), (KEYS[1], FRAME)], "me")
        assert grants == [Refusal.PRESENT, Refusal.UNWANTED]
        await asyncio.sleep(10)
        assert not any(there(tier))
        manager.unfreeze()
        assert await manager.flush()
        assert there(tier, KEYS[:1]) == [True]

    run(body, make_tier)


def test_the_time_of_a_value_ends_in_every_tier():
    async def body(manager, tier):
        put(manager, KEYS[:1])
        await manager.flush()
        manager.pool.drop(KEYS[:1])
        await asyncio.sleep(31)
        assert (await manager.load(KEYS[:1], "me")).reason is Reason.MISS
        put(manager, KEYS[:1])
        await manager.flush()
        assert there(tier, KEYS[:1]) == [True]

    run(body, lambda: make_tier(ttl=30.0))


def test_a_smaller_limit_evicts_at_once():
    async def body(manager, tier):
        put(manager, KEYS)
        await manager.flush()
        told = []
        tier.context = replace(tier.context, emit=told.append)
        await manager.set_limit("disk", 3 * FRAME)
        assert tier.holdings.used == 3 * FRAME
        assert sum(there(tier)) == 3
        assert [(event.tier, event.count) for event in told] == [("disk", len(KEYS) - 3)]

    run(body, make_tier, capacity=64 * FRAME)


def test_a_local_tier_without_a_limit_is_refused():
    """Seen in LMCache#1724."""
    context = simulated_context(tier="disk")

    class Endless(Recording):
        async def open(self):
            await super().open()
            from dataclasses import replace

            self.capabilities = replace(self.capabilities, usage=False)

    async def main():
        backend = Endless(context, make_memory(context))
        manager = make_manager([make_tier(backend=backend, context=context, size=None)])
        with pytest.raises(ConfigError, match="needs a limit"):
            await manager.open()

    run_simulated(main())
