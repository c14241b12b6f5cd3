"""Bringing values up: whose wait ends when, and what a caller is given."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from lmcache_core.spi import ConfigError, Unavailable
from lmcache_core.storage import Reason
from lmcache_core.testing.contexts import simulated_context
from lmcache_core.testing.fakes import Flaky, Recording
from lmcache_core.testing.simulation import run_simulated
from lmcache_core.testing.worlds import (
    Late,
    key_of,
    make_manager,
    make_memory,
    make_tier,
    put,
    verify_lease,
)

KEYS = [key_of(i) for i in range(6)]


async def lowered(manager, keys=KEYS):
    """Values that are only in the lower tier."""
    assert all(put(manager, keys))
    assert await manager.flush()
    manager.pool.drop(keys)


def run(body, tier=None, **settings):
    async def main():
        lower = tier() if tier is not None else make_tier()
        manager = make_manager([lower], **settings)
        await manager.open()
        await body(manager, lower)
        manager.check()
        left = await manager.aclose()
        assert not left.quarantined and not left.errors, left
        for owner in manager.tasks():
            assert not len(owner), f"{owner.owner} has tasks left"

    run_simulated(main())


def test_what_was_stored_comes_back_from_the_lower_tier():
    """Seen in LMCache#1213."""

    async def body(manager, tier):
        await lowered(manager)
        loaded = await manager.load(KEYS, "me")
        assert loaded.reason is Reason.COMPLETE
        assert [lease.key for lease in loaded.leases] == KEYS
        for lease in loaded.leases:
            verify_lease(lease)
        manager.release(loaded.leases)

    run(body)


def test_a_hole_ends_the_run_with_a_miss():
    async def body(manager, tier):
        await lowered(manager, KEYS[:3])
        loaded = await manager.load(KEYS, "me")
        assert (len(loaded.leases), loaded.reason) == (3, Reason.MISS)
        manager.release(loaded.leases)

    run(body)


def test_equal_loads_in_flight_are_one_load():
    context = simulated_context(tier="disk")
    recording = Recording(context, make_memory(context))

    async def body(manager, tier):
        await lowered(manager)
        both = await asyncio.gather(manager.load(KEYS, "a"), manager.load(KEYS, "b"))
        for loaded in both:
            assert loaded.reason is Reason.COMPLETE
            manager.release(loaded.leases)
        loads = [call for call in recording.calls if call.verb == "load"]
        assert [call.keys for call in loads] == [tuple(KEYS)]
        snapshot = manager.metrics.snapshot()
        assert snapshot.total("lmcache_tier_coalesced_total", tier="disk") == len(KEYS)

    run(body, lambda: make_tier(backend=recording, context=context, seconds=0.01))


def test_a_deadline_ends_the_wait_and_not_the_memory():
    """Seen in LMCache#4516, LMCache#1960."""
    context = simulated_context(tier="disk")
    late = Late(context, make_memory(context))

    async def body(manager, tier):
        await lowered(manager)
        late.seconds = 100.0
        begun = manager.context.clock.now()
        loaded = await manager.load(KEYS, "me", deadline=begun + 0.2)
        assert (len(loaded.leases), loaded.reason) == (0, Reason.DEADLINE)
        assert manager.context.clock.now() - begun < 0.2001
        await asyncio.sleep(0.01)
        stock = manager.pool.accounting()
        assert stock.quarantined == tier.quarantine.nbytes > 0
        manager.pool.check()
        await asyncio.sleep(200)
        assert manager.pool.accounting().quarantined == tier.quarantine.nbytes == 0

    run(body, lambda: make_tier(backend=late, context=context))


def test_a_tier_with_too_much_in_quarantine_is_an_instant_miss():
    context = simulated_context(tier="disk")
    late = Late(context, make_memory(context))

    async def body(manager, tier):
        await lowered(manager)
        late.seconds = 1000.0
        for key in KEYS[:5]:
            loaded = await manager.load([key], "me", deadline=manager.context.clock.now() + 0.1)
            assert loaded.reason is Reason.DEADLINE
        await asyncio.sleep(0.01)
        assert tier.quarantine.full
        begun = manager.context.clock.now()
        loaded = await manager.load(KEYS[5:], "me", deadline=begun + 1)
        assert loaded.reason is not Reason.COMPLETE
        assert manager.context.clock.now() == begun
        await asyncio.sleep(2000)

    run(body, lambda: make_tier(backend=late, context=context), quarantine=0.1)


def test_one_caller_leaving_does_not_end_the_load_of_another():
    async def body(manager, tier):
        await lowered(manager)
        now = manager.context.clock.now()
        hasty = asyncio.create_task(manager.load(KEYS, "hasty", deadline=now + 0.001))
        patient = asyncio.create_task(manager.load(KEYS, "patient"))
        assert (await hasty).reason is Reason.DEADLINE
        loaded = await patient
        assert loaded.reason is Reason.COMPLETE
        manager.release(loaded.leases)

    run(body, lambda: make_tier(seconds=0.05))


def test_a_cancelled_load_leaves_nothing_behind():
    """Seen in LMCache#3006."""

    async def body(manager, tier):
        await lowered(manager, KEYS[:3])
        put(manager, KEYS[3:4])
        task = asyncio.create_task(manager.load(KEYS[3:4] + KEYS[:3], "me"))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await asyncio.sleep(1)
        stock = manager.pool.accounting()
        assert stock.reserved == stock.leased == stock.quarantined == 0

    run(body, lambda: make_tier(seconds=0.05))


def test_a_full_pool_gives_the_longest_fitting_prefix():
    """Seen in LMCache#3022."""

    async def body(manager, tier):
        await lowered(manager)
        other = [key_of(100 + i) for i in range(2)]
        put(manager, other)
        await manager.flush()
        pinned = manager.lease(other, "holder")
        loaded = await manager.load(KEYS, "me")
        assert loaded.reason is Reason.FULL
        assert [lease.key for lease in loaded.leases] == KEYS[: len(loaded.leases)]
        assert len(loaded.leases) == 4
        manager.release(loaded.leases)
        manager.release(pinned)

    run(body, capacity=12 * 4096, dirty_cap=1.0)


def test_a_failing_tier_is_a_reason_and_its_memory_comes_back():
    """Seen in LMCache#3388."""
    context = simulated_context(tier="disk")
    flaky = Flaky(context, make_memory(context))

    async def body(manager, tier):
        await lowered(manager)
        flaky.failures = [Unavailable("gone")]
        loaded = await manager.load(KEYS, "me")
        assert (len(loaded.leases), loaded.reason) == (0, Reason.FAILED)
        assert manager.pool.accounting().reserved == 0
        loaded = await manager.load(KEYS, "me")
        assert loaded.reason is Reason.COMPLETE
        manager.release(loaded.leases)

    run(body, lambda: make_tier(backend=flaky, context=context))


def test_chunks_are_told_as_they_arrive():
    told = []

    async def body(manager, tier):
        await lowered(manager, KEYS[1:])
        put(manager, KEYS[:1])
        loaded = await manager.load(KEYS, "me", done=lambda at, lease: told.append((at, lease.key)))
        assert told == list(enumerate(KEYS))
        manager.release(loaded.leases)

    run(body)


def test_without_promotion_nothing_stays_after_the_last_lease():
    async def body(manager, tier):
        await lowered(manager)
        loaded = await manager.load(KEYS, "me")
        assert loaded.reason is Reason.COMPLETE
        for lease in loaded.leases:
            verify_lease(lease)
        manager.release(loaded.leases)
        assert manager.pool.accounting().values == 0

    run(body, lambda: make_tier(promote=False))


def test_loading_writes_nothing_back_to_where_it_came_from():
    """Every fetch written back doubled the I/O: LMCache#2744."""
    context = simulated_context(tier="disk")
    recording = Recording(context, make_memory(context))

    async def body(manager, tier):
        await lowered(manager)
        recording.calls.clear()
        loaded = await manager.load(KEYS, "me")
        manager.release(loaded.leases)
        await manager.flush()
        assert {call.verb for call in recording.calls} == {"load"}

    run(body, lambda: make_tier(backend=recording, context=context))


def test_prefetching_stays_within_its_share():
    async def body(manager, tier):
        await lowered(manager)
        loaded = await manager.prefetch(KEYS, "me")
        assert (len(loaded.leases), loaded.reason) == (2, Reason.FULL)
        manager.release(loaded.leases)

    run(body, lambda: make_tier(seconds=0.01), prefetch=0.07, capacity=64 * 4096)


def test_memory_is_registered_once_with_a_tier_that_gains_from_it():
    context = simulated_context(tier="disk")
    regions = []

    class Registering(Recording):
        async def open(self):
            await super().open()
            self.capabilities = replace(self.capabilities, register=True)

        async def register(self, region, /):
            regions.append(region)
            return True

    async def body(manager, tier):
        await lowered(manager)
        loaded = await manager.load(KEYS, "me")
        manager.release(loaded.leases)
        assert [region.nbytes for region in regions] == [manager.pool.capacity]
        assert regions[0].pointer == manager.pool.arena.segments[0].address

    backend = Registering(context, make_memory(context))
    run(body, lambda: make_tier(backend=backend, context=context))


def test_a_tier_that_keeps_values_it_cannot_list_is_refused():
    context = simulated_context(tier="disk")

    class Blind(Recording):
        async def open(self):
            await super().open()
            self.capabilities = replace(self.capabilities, persistent=True, scan=False)

    async def main():
        tier = make_tier(backend=Blind(context, make_memory(context)), context=context)
        with pytest.raises(ConfigError, match="cannot list"):
            await make_manager([tier]).open()

    run_simulated(main())
