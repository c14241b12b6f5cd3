"""A batch is verified part by part, and stored as it is verified."""

from __future__ import annotations

import asyncio

import pytest

from lmcache_core.spi import Corrupt, Store, StoreStatus, Unavailable
from lmcache_core.testing.contexts import simulated_context
from lmcache_core.testing.fakes import Flaky, Slow
from lmcache_core.testing.simulation import run_simulated
from lmcache_core.testing.worlds import key_of, make_memory, plain_frame
from lmcache_core.wrappers import Check, CheckOptions, check

COUNT = 6
NBYTES = 200_000  # long enough for a thread; a part each
KEYS = [key_of(number) for number in range(COUNT)]


@pytest.fixture(autouse=True)
def _parts_of_one_value(monkeypatch):
    monkeypatch.setattr(check, "PART_NBYTES", 1)


class Noting(Flaky):
    """Notes when which keys came."""

    def __init__(self, context, inner):
        super().__init__(context, inner)
        self.came = []

    async def around(self, verb, batch, call, done, deadline, /):
        if verb == "store":
            self.came.append((self.context.clock.now(), [item.key for item in batch]))
        return await super().around(verb, batch, call, done, deadline)


def checked(seconds=None):
    context = simulated_context(latency_s=1.0)
    noting = Noting(context, Slow(context, make_memory(context), seconds))
    return context, Check(CheckOptions(), context, noting), noting


def stores(*damaged):
    frames = [bytearray(plain_frame(key, NBYTES)) for key in KEYS]
    for number in damaged:
        frames[number][-1] ^= 1
    return [Store(key, (memoryview(frame),)) for key, frame in zip(KEYS, frames, strict=True)]


def test_the_first_values_are_stored_while_the_others_are_verified():
    _, tier, noting = checked()

    async def main():
        await tier.open()
        told = []
        results = await tier.store(stores(1), done=lambda *each: told.append(each))
        assert [result.status for result in results].count(StoreStatus.STORED) == COUNT - 1
        assert isinstance(results[1].error, Corrupt)
        assert sorted(told, key=lambda each: each[0]) == list(enumerate(results))
        assert sorted(key for _, keys in noting.came for key in keys) == sorted(
            key for key in KEYS if key != KEYS[1]
        )
        assert noting.came[0][0] < noting.came[-1][0]

    run_simulated(main())


def test_small_values_are_stored_in_one_call(monkeypatch):
    monkeypatch.undo()
    _, tier, noting = checked()

    async def main():
        await tier.open()
        await tier.store([Store(key, (memoryview(plain_frame(key, 100)),)) for key in KEYS])
        assert [keys for _, keys in noting.came] == [KEYS]

    run_simulated(main())


def test_a_part_that_fails_fails_alone():
    _, tier, noting = checked()

    async def main():
        await tier.open()
        told = []
        noting.failures = [Unavailable("blip")]
        results = await tier.store(stores(), done=lambda *each: told.append(each))
        (lost,) = noting.came[0][1]
        for key, result in zip(KEYS, results, strict=True):
            wanted = StoreStatus.FAILED if key == lost else StoreStatus.STORED
            assert result.status is wanted
        assert sorted(told, key=lambda each: each[0]) == list(enumerate(results))

    run_simulated(main())


def test_when_all_parts_fail_the_call_does_and_no_item_has_a_result():
    _, tier, noting = checked()

    async def main():
        await tier.open()
        told = []
        noting.failures = [Unavailable("down")] * COUNT
        with pytest.raises(Unavailable, match="down"):
            await tier.store(stores(), done=lambda *each: told.append(each))
        assert told == []

    run_simulated(main())


@pytest.mark.parametrize("moment", [0.5, 1.5, 2.5, 3.5, 5.5])
def test_after_a_cancellation_nothing_more_is_verified_or_stored(moment):
    context, tier, noting = checked(seconds=5.0)

    async def main():
        await tier.open()
        task = asyncio.ensure_future(tier.store(stores()))
        await context.clock.sleep(moment)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # What a thread had begun to verify is waited for; no more than that.
        assert context.clock.now() <= moment + 2.0
        found = await noting.inner.lookup(KEYS)
        await context.clock.sleep(100.0)
        assert await noting.inner.lookup(KEYS) == found

    run_simulated(main())
