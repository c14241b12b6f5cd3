"""What each wrapper adds."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core.observers import Metrics, check_identities
from lmcache_core.spi import (
    Corrupt,
    HealthChanged,
    Load,
    LoadStatus,
    Store,
    StoreStatus,
    Unavailable,
)
from lmcache_core.testing.contexts import simulated_context
from lmcache_core.testing.fakes import Flaky, Recording, Slow
from lmcache_core.testing.simulation import run_simulated
from lmcache_core.testing.worlds import (
    frame_nbytes,
    key_of,
    make_memory,
    plain_frame,
)
from lmcache_core.wrappers import (
    Breaker,
    BreakerOptions,
    Chaos,
    ChaosOptions,
    Check,
    CheckOptions,
    Limit,
    LimitOptions,
    Measured,
    Retried,
    Retry,
    RetryOptions,
)

KEYS = [key_of(i) for i in range(5)]


def world(**overrides):
    events = []
    context = simulated_context(tier="t", emit=events.append, **overrides)
    memory = make_memory(context)
    return context, memory, events


def store_of(key, nbytes=1000):
    return Store(key, (memoryview(plain_frame(key, nbytes)),))


async def load_one(backend, key, nbytes):
    room = memoryview(bytearray(nbytes))
    return (await backend.load([Load(key, (room,))]))[0], room


# -- breaker


def test_breaker_opens_after_failures_in_a_row_and_probes_after_a_rest():
    """Seen in LMCache#1938."""
    context, memory, events = world()
    flaky = Flaky(context, memory)
    breaker = Breaker(BreakerOptions(open_after=3, pause=2.0), context, flaky)

    async def main():
        await breaker.open()
        flaky.failures = [Unavailable("down")] * 4
        for _ in range(3):
            with pytest.raises(Unavailable, match="down"):
                await breaker.lookup(KEYS)
        for _ in range(5):
            with pytest.raises(Unavailable, match="resting"):
                await breaker.lookup(KEYS)
        assert len(flaky.failures) == 1, "a resting breaker asked the store"
        await context.clock.sleep(2.0)
        with pytest.raises(Unavailable, match="down"):
            await breaker.lookup(KEYS)  # the probe fails: a longer rest
        with pytest.raises(Unavailable, match="resting"):
            await breaker.lookup(KEYS)
        await context.clock.sleep(4.0)
        assert await breaker.lookup(KEYS) == [None] * 5
        states = [event.state for event in events if isinstance(event, HealthChanged)]
        assert states == ["open", "half open", "open", "half open", "closed"]

    run_simulated(main())


def test_only_one_call_probes():
    """Seen in Mooncake#3299."""
    context, memory, _ = world()
    flaky = Flaky(context, memory)
    slow = Slow(context, flaky, 1.0)
    breaker = Breaker(BreakerOptions(open_after=1, pause=0.1), context, slow)

    async def main():
        await breaker.open()
        flaky.failures = [Unavailable("down")]
        with pytest.raises(Unavailable):
            await breaker.lookup(KEYS)
        await context.clock.sleep(1.0)
        results = await asyncio.gather(
            *(breaker.lookup(KEYS) for _ in range(4)), return_exceptions=True
        )
        assert sum(isinstance(each, Unavailable) for each in results) == 3

    run_simulated(main())


def test_damage_and_absence_do_not_open_a_breaker():
    context, memory, events = world()
    check = Check(CheckOptions(stores=False), context, memory)
    breaker = Breaker(BreakerOptions(open_after=1), context, check)

    async def main():
        await breaker.open()
        await breaker.store([Store(KEYS[0], (memoryview(b"junk"),))])
        result, _ = await load_one(breaker, KEYS[0], 100)
        assert isinstance(result.error, Corrupt)
        assert (await load_one(breaker, KEYS[1], 100))[0].status is LoadStatus.MISSED
        assert not events

    run_simulated(main())


# -- retry


def test_retry_repeats_only_what_may_succeed_within_the_deadline():
    context, memory, events = world()
    flaky = Flaky(context, memory)
    retry = Retry(RetryOptions(attempts=3), context, flaky)

    async def main():
        await retry.open()
        flaky.failures = [Unavailable("blip"), Unavailable("blip")]
        assert await retry.lookup(KEYS) == [None] * 5
        assert len([e for e in events if isinstance(e, Retried)]) == 2
        flaky.failures = [Unavailable("no use", retryable=False)]
        with pytest.raises(Unavailable, match="no use"):
            await retry.lookup(KEYS)
        flaky.failures = [Unavailable("late")]
        with pytest.raises(Unavailable, match="late"):
            await retry.lookup(KEYS, deadline=context.clock.now())
        assert not flaky.failures

    run_simulated(main())


def test_retries_of_a_dead_store_end_with_the_budget():
    context, memory, _ = world()
    flaky = Flaky(context, memory)
    retry = Retry(RetryOptions(attempts=2, budget=0.1), context, flaky)

    async def main():
        await retry.open()
        flaky.failures = [Unavailable("dead")] * 10_000
        for _ in range(200):
            with pytest.raises(Unavailable):
                await retry.lookup(KEYS)
        asked = 10_000 - len(flaky.failures)
        assert 200 < asked <= 200 * 1.1 + Retry.BURST + 1

    run_simulated(main())


# -- limit


def test_limit_cuts_batches_and_refuses_long_values():
    context, memory, _ = world()
    recording = Recording(context, memory)
    limit = Limit(LimitOptions(max_batch=2, max_value=6000, concurrency=1), context, recording)

    async def main():
        await limit.open()
        stores = [store_of(key, 5000 if at == 2 else 100) for at, key in enumerate(KEYS)]
        told = []
        results = await limit.store(stores, done=lambda at, result: told.append(at))
        refused = [at for at, each in enumerate(results) if each.status is StoreStatus.REFUSED]
        assert refused == [2]
        assert sorted(told) == [0, 1, 2, 3, 4]
        assert {len(call.keys) for call in recording.calls} == {2}
        assert limit.capabilities.max_value == 6000

    run_simulated(main())


# -- check


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_flipped_bit_or_cut_is_found(data):
    context, memory, _ = world()
    check = Check(CheckOptions(stores=False), context, memory)
    whole = bytearray(plain_frame(KEYS[0], 300))
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del whole[data.draw(st.integers(0, len(whole) - 1)) :]

    async def main():
        await check.open()
        await check.store([Store(KEYS[0], (memoryview(whole),))])
        result, _ = await load_one(check, KEYS[0], len(whole))
        assert isinstance(result.error, Corrupt)

    run_simulated(main())


def test_another_keys_frame_is_damage():
    """Seen in LMCache#4385."""
    context, memory, _ = world()
    check = Check(CheckOptions(stores=False), context, memory)

    async def main():
        await check.open()
        whole = plain_frame(KEYS[1], 300)
        await check.store([Store(KEYS[0], (memoryview(whole),))])
        assert isinstance((await load_one(check, KEYS[0], len(whole)))[0].error, Corrupt)

    run_simulated(main())


def test_rotten_memory_is_not_stored():
    context, memory, _ = world()
    check = Check(CheckOptions(), context, memory)

    async def main():
        await check.open()
        whole = bytearray(plain_frame(KEYS[0], 300_000))  # long enough for a thread
        whole[-1] ^= 1
        results = await check.store([Store(KEYS[0], (memoryview(whole),)), store_of(KEYS[1])])
        assert isinstance(results[0].error, Corrupt)
        assert results[1].status is StoreStatus.STORED
        assert await memory.lookup([KEYS[0]]) == [None]

    run_simulated(main())


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_range_is_right_or_damaged(data):
    context, memory, _ = world()
    check = Check(CheckOptions(stores=False), context, memory)
    good = plain_frame(KEYS[0], 300)
    offset = data.draw(st.integers(0, len(good) - 1))
    length = data.draw(st.integers(1, len(good) - offset))
    broken = data.draw(st.one_of(st.none(), st.integers(0, len(good) - 1)))
    whole = bytearray(good)
    if broken is not None:
        whole[broken] ^= 8

    async def main():
        await check.open()
        await check.store([Store(KEYS[0], (memoryview(whole),))])
        room = memoryview(bytearray(length))
        result = (await check.load([Load(KEYS[0], (room,), offset, length)]))[0]
        if result.status is LoadStatus.FILLED:
            assert bytes(room) == good[offset : offset + length]
        else:
            assert broken is not None
            assert isinstance(result.error, Corrupt)

    run_simulated(main())


# -- chaos and metrics


def test_chaos_is_drawn_from_the_context():
    def history(seed):
        context, memory, _ = world(random=random.Random(seed))
        options = ChaosOptions(fail=0.3, fail_item=0.3, flip=0.5, delay=0.5, delay_s=1.0)
        chaos = Chaos(options, context, memory)
        said = []

        async def main():
            await chaos.open()
            for _ in range(30):
                try:
                    said.append(str(await chaos.store([store_of(key) for key in KEYS])))
                    said.append(bytes((await load_one(chaos, KEYS[0], 6000))[1]))
                except Unavailable as error:
                    said.append(str(error))
            said.append(context.clock.now())

        run_simulated(main())
        return said

    assert history(1) == history(1) != history(2)


def test_what_is_asked_is_counted_as_answered_even_when_it_fails():
    context, memory, _ = world()
    metrics, flaky = Metrics(), Flaky(context, memory)
    measured = Measured(metrics, context, flaky)

    async def main():
        await measured.open()
        await measured.store([store_of(key) for key in KEYS[:3]])
        await measured.store([store_of(key) for key in KEYS[:4]])
        await load_one(measured, KEYS[0], 9000)
        await load_one(measured, KEYS[4], 9000)
        await load_one(measured, KEYS[0], 5)
        flaky.failures = [Unavailable("gone")] * 2
        for verb in (measured.load([]), measured.store([store_of(KEYS[4])])):
            with pytest.raises(Unavailable):
                await verb

    run_simulated(main())
    snapshot = metrics.snapshot()
    assert check_identities(snapshot) == []
    stores = {s.labels[1][1]: s.value for s in snapshot.matching("lmcache_tier_stores_total")}
    assert stores == {"stored": 4, "present": 3, "failed": 1}
    loads = {s.labels[1][1]: s.value for s in snapshot.matching("lmcache_tier_loads_total")}
    assert loads == {"filled": 1, "missed": 1, "failed": 1}
    assert snapshot.total("lmcache_tier_written_bytes_total") == 4 * frame_nbytes(1000)
