"""What operators ask for, and what a restart leaves."""

from __future__ import annotations

import asyncio

import pytest

from lmcache_core.spi import ConfigError, Unavailable
from lmcache_core.storage import Reason
from lmcache_core.testing.contexts import simulated_context
from lmcache_core.testing.fakes import Flaky
from lmcache_core.testing.simulation import run_simulated
from lmcache_core.testing.worlds import (
    PAGE,
    Lasting,
    Late,
    frame_nbytes,
    key_of,
    make_manager,
    make_memory,
    make_tier,
    plain_frame,
    put,
    verify_lease,
)

KEYS = [key_of(i) for i in range(8)]
FRAME = frame_nbytes(PAGE)


class Store:
    """Bytes that outlive managers, and tiers on them."""

    def __init__(self, name="disk", *, shared=False, seconds=0.0, **settings):
        self.context = simulated_context(tier=name)
        self.memory = make_memory(self.context)
        kept = Lasting(self.context, self.memory, shared=shared, persistent=True)
        self.flaky = Flaky(self.context, kept)
        self.late = Late(self.context, self.flaky, seconds)
        settings.setdefault("size", None if shared else 1 << 20)
        self.name, self.settings = name, settings

    def tier(self):
        return make_tier(self.name, self.late, context=self.context, **self.settings)

    def holds(self, keys=KEYS):
        return [key in self.memory._values for key in keys]


def run(body, *stores, **settings):
    async def main():
        manager = make_manager([store.tier() for store in stores], **settings)
        await manager.open()
        await body(manager, *stores)
        await asyncio.sleep(100)
        manager.check()
        await manager.aclose()

    run_simulated(main())


async def restarted(*stores, **settings):
    manager = make_manager([store.tier() for store in stores], **settings)
    await manager.open()
    return manager


@pytest.mark.parametrize("shared", [False, True])
def test_deleted_values_are_gone_everywhere_and_counted(shared):
    async def body(manager, store):
        put(manager, KEYS)
        await manager.flush()
        lease = manager.lease(KEYS[:1], "reader")
        assert await manager.delete(KEYS[:3]) == 6
        assert store.holds() == [False] * 3 + [True] * 5
        assert (await manager.load(KEYS[:1], "me")).reason is Reason.MISS
        verify_lease(lease[0])  # given before: stays good
        manager.release(lease)
        assert all(put(manager, KEYS[:3]))
        await manager.flush()
        assert all(store.holds())

    run(body, Store(shared=shared))


def test_a_value_deleted_while_it_is_written_does_not_come_back():
    async def body(manager, store):
        put(manager, KEYS[:1])
        await asyncio.sleep(0.2)
        assert manager.tiers[0].storing
        await manager.delete(KEYS[:1])
        await asyncio.sleep(10)
        assert store.holds(KEYS[:1]) == [False]
        assert manager.tiers[0].holdings.used == 0

    run(body, Store(seconds=0.5))


def test_a_value_deleted_while_it_is_loaded_does_not_come_back():
    async def body(manager, store):
        put(manager, KEYS[:1])
        await manager.flush()
        manager.pool.drop(KEYS[:1])
        loading = asyncio.create_task(manager.load(KEYS[:1], "me"))
        await asyncio.sleep(0.2)
        await manager.delete(KEYS[:1])
        assert (await loading).reason is Reason.CANCELLED
        await asyncio.sleep(10)
        assert manager.lookup_resident(KEYS[:1]) == [None]

    run(body, Store(seconds=0.5))


@pytest.mark.parametrize("shared", [False, True])
def test_a_deletion_that_is_not_known_to_have_happened_is_told(shared):
    async def body(manager, store):
        put(manager, KEYS, tags=["red"])
        await manager.flush()
        if shared:
            store.flaky.failures = [Unavailable("gone")]
            with pytest.raises(Unavailable):
                await manager.delete(KEYS[:1])
        store.flaky.scan = None
        store.flaky.failures = [None] * 20
        assert await manager.delete(KEYS[1:2]) == 2

    run(body, Store(shared=shared))


@pytest.mark.parametrize("shared", [False, True])
def test_clear_takes_what_is_wanted_of_one_tier_or_all(shared):
    """Seen in LMCache#1660."""

    async def body(manager, store):
        put(manager, KEYS)
        await manager.flush()
        assert await manager.clear(lambda key: key in KEYS[:2], tier="disk") == 2
        assert store.holds() == [False] * 2 + [True] * 6
        assert None not in manager.lookup_resident(KEYS)
        assert await manager.clear() == 8 + 6
        assert not any(store.holds())

    run(body, Store(shared=shared))


@pytest.mark.parametrize("shared", [False, True])
def test_tags_survive_a_restart(shared):
    async def main():
        store = Store(shared=shared)
        manager = await restarted(store)
        put(manager, KEYS[:2], tags=["red"])
        put(manager, KEYS[2:4], tags=["blue", "red"])
        put(manager, KEYS[4:])
        await manager.flush()
        await manager.aclose()
        manager = await restarted(store)
        assert await manager.invalidate("blue") == 2
        assert store.holds() == [True, True, False, False] + [True] * 4
        loaded = await manager.load(KEYS[:2], "me")
        manager.release(loaded.leases)
        assert await manager.invalidate("red") == 4  # two in memory, two below
        assert store.holds() == [False] * 4 + [True] * 4
        manager.check()
        await manager.aclose()

    run_simulated(main())


def test_what_is_being_written_under_an_invalid_tag_never_appears():
    async def body(manager, store):
        grants = manager.reserve([(KEYS[0], FRAME)], "me", tags=["red"])
        await manager.invalidate("red")
        assert manager.commit_batch(grants, [bytes(16)]) == [False]
        assert manager.lookup_resident(KEYS[:1]) == [None]

    run(body, Store())


@pytest.mark.parametrize("shared", [False, True])
def test_listing_names_each_value_once(shared):
    async def body(manager, store):
        put(manager, KEYS)
        await manager.flush()
        for tier in ("cpu", "disk"):
            listed, after = [], None
            while True:
                page = await manager.list(tier, after=after, limit=3)
                listed += page.values
                after = page.after
                if after is None:
                    break
            assert sorted(key for key, _ in listed) == sorted(KEYS)
            assert {nbytes for _, nbytes in listed} == {FRAME}

    run(body, Store(shared=shared))


def test_values_are_copied_and_moved_between_tiers():
    async def body(manager, one, two):
        put(manager, KEYS)
        await manager.flush()
        await manager.clear(tier="two")
        assert await manager.copy(KEYS[:3], "one", "two") == KEYS[:3]
        assert two.holds() == [True] * 3 + [False] * 5
        assert await manager.move(KEYS[3:5], "one", "two") == KEYS[3:5]
        assert one.holds(KEYS[3:5]) == [False, False]
        assert two.holds(KEYS[3:5]) == [True, True]

    run(body, Store("one"), Store("two"))


def test_tiers_come_and_go_while_serving():
    async def body(manager, one):
        put(manager, KEYS)
        await manager.flush()
        two = Store("two")
        await manager.add_tier(two.tier(), position=0)
        assert [tier.name for tier in manager.tiers] == ["two", "one"]
        with pytest.raises(ConfigError, match="already"):
            await manager.add_tier(two.tier())
        put(manager, [key_of(99)])
        await manager.flush()
        assert two.holds([key_of(99)]) == [True]
        assert not (await manager.remove_tier("one")).errors
        manager.pool.drop(KEYS)
        assert (await manager.load(KEYS, "me")).reason is Reason.MISS
        await manager.add_tier(one.tier())
        loaded = await manager.load(KEYS, "me")
        assert loaded.reason is Reason.COMPLETE
        manager.release(loaded.leases)
        with pytest.raises(ConfigError, match="no lower tier 'three'; there are: two, one"):
            await manager.remove_tier("three")

    run(body, Store("one"))


def test_a_restart_finds_what_was_there_and_stays_within_the_limit():
    """A folder with old files grew past its limit: LMCache#1454.

    Seen in LMCache#1788, LMCache#1399.

    Seen in Mooncake#3139.
    """

    async def main():
        store = Store()
        manager = await restarted(store)
        put(manager, KEYS)
        await manager.flush()
        await manager.aclose()
        store.settings["size"] = 5 * FRAME
        manager = await restarted(store)
        await manager.tiers[0].complete.wait()
        assert sum(store.holds()) == 5
        put(manager, [key_of(50)])
        await manager.flush()
        assert sum(store.holds([*KEYS, key_of(50)])) == 5
        manager.check()
        await manager.aclose()

    run_simulated(main())


def test_lookups_are_answered_while_the_index_is_rebuilt():
    async def main():
        store = Store()
        manager = await restarted(store)
        put(manager, KEYS)
        await manager.flush()
        await manager.aclose()

        async def scan(after=None, /, *, limit=1000):
            await store.context.clock.sleep(5)
            return await store.memory.scan(after, limit=3)

        store.late.scan = scan
        manager = await restarted(store)
        loaded = await manager.load(KEYS, "me")
        assert loaded.reason is Reason.COMPLETE
        manager.release(loaded.leases)
        assert await manager.delete(KEYS[:1]) == 2
        put(manager, [key_of(60)])
        await asyncio.sleep(1)
        assert store.holds([key_of(60)]) == [False], "written before the index was complete"
        await asyncio.sleep(100)
        assert store.holds([key_of(60)]) == [True]
        assert (await manager.load(KEYS[:1], "me")).reason is Reason.MISS
        manager.check()
        await manager.aclose()

    run_simulated(main())


@pytest.mark.parametrize("shared", [False, True])
def test_a_damaged_value_is_a_miss_then_removed_then_stored_anew(shared):
    """Law B15 through the manager: no value is damaged for ever."""

    async def body(manager, store):
        put(manager, KEYS[:3])
        await manager.flush()
        manager.pool.drop(KEYS)
        value = store.memory._values[KEYS[1]]
        whole = bytearray(value.content)
        whole[-1] ^= 1
        store.memory._values[KEYS[1]] = value._replace(content=bytes(whole))
        loaded = await manager.load(KEYS[:3], "me")
        assert (len(loaded.leases), loaded.reason) == (1, Reason.DAMAGED)
        manager.release(loaded.leases)
        assert (await manager.load(KEYS[1:2], "me")).reason is Reason.MISS
        await asyncio.sleep(1)
        assert store.holds(KEYS[1:2]) == [False]
        assert put(manager, KEYS[1:2]) == [True]
        await manager.flush()
        assert store.memory._values[KEYS[1]].content == plain_frame(KEYS[1], PAGE)
        snapshot = manager.metrics.snapshot()
        assert snapshot.total("lmcache_tier_damaged_total", tier="disk") == 1

    run(body, Store(shared=shared))


def test_a_value_of_no_format_is_damage_too():
    async def body(manager, store):
        store.memory._values[KEYS[0]] = type(
            "Value", (), {"content": b"not a frame", "etag": "1", "expires": None}
        )()
        assert (await manager.load(KEYS[:1], "me")).reason is Reason.DAMAGED
        await asyncio.sleep(1)
        assert store.holds(KEYS[:1]) == [False]

    run(body, Store(shared=True))


def test_a_value_the_store_lost_is_forgotten_at_the_first_failed_load():
    """Seen in vllm#20063, LMCache#4745."""

    async def body(manager, store):
        put(manager, KEYS[:1])
        await manager.flush()
        manager.pool.drop(KEYS)
        store.memory._forget(KEYS[0])
        assert (await manager.load(KEYS[:1], "me")).reason is Reason.MISS
        assert manager.tiers[0].holdings.find(KEYS[:1], 0.0) == [-1]
        assert manager.tiers[0].holdings.used == 0

    run(body, Store())


def test_a_store_that_does_not_answer_at_the_start_is_opened_later():
    async def main():
        store = Store()
        tries = []

        async def open_late():
            tries.append(store.context.clock.now())
            if len(tries) < 3:
                raise Unavailable("starting")

        store.flaky.open = open_late
        store.flaky.capabilities = store.flaky.inner.capabilities
        manager = await restarted(store)
        with pytest.raises(Unavailable, match="disk is not open yet"):
            await manager.clear()  # what it may have cannot be removed now
        put(manager, KEYS)
        assert (await manager.load([key_of(77)], "me")).reason is Reason.DEADLINE
        await asyncio.sleep(60)
        assert len(tries) == 3
        assert all(store.holds())
        await manager.aclose()

    run_simulated(main())


def test_closing_ends_in_time_with_a_hung_tier_and_says_what_is_left():
    async def main():
        store = Store()
        manager = await restarted(store)
        put(manager, KEYS[:2])
        await manager.flush()
        manager.pool.drop(KEYS)
        put(manager, KEYS[2:3])
        store.late.seconds = 10_000.0
        loading = asyncio.create_task(manager.load(KEYS[:2], "me"))
        await asyncio.sleep(0.1)
        begun = manager.context.clock.now()
        left = await manager.aclose(deadline=begun + 3)
        assert manager.context.clock.now() <= begun + 3.2
        assert left.quarantined == {"disk": 3 * FRAME}
        assert "disk" in left.errors
        assert (await loading).reason in (Reason.CANCELLED, Reason.DEADLINE)
        assert (await manager.load(KEYS, "me")).reason is Reason.CLOSED
        assert await manager.aclose() is left
        await asyncio.sleep(20_000)
        assert manager.pool.accounting().quarantined == 0

    run_simulated(main())
