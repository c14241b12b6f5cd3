"""What operators pin stays, within its share and its time, and nothing else is lost by it."""

import asyncio

import pytest
from lmcache_server.pins import LONGEST, Pins

from lmcache_core.config import load
from lmcache_core.spi import ConfigError
from lmcache_core.storage.build import build
from tests.wire.daemons import key, value


@pytest.fixture
def world():
    """Runs a coroutine function with a manager of 16 MiB, pins on it, and a clock to turn."""
    clock = [100.0]

    def run(scene):
        async def play():
            effective = load(flags={"tiers": [{"cpu": {"size": "16MiB", "populate": False}}]})
            manager = await build(effective.config, effective.registry)
            pins = Pins(manager, lambda: clock[0])
            try:
                await scene(manager, pins, clock)
                pins.unpin([])
                assert pins.nbytes == 0
                assert manager.pool.accounting().leased == 0
                manager.check()
            finally:
                await manager.aclose()

        asyncio.run(play())

    return run


async def fill(manager, *numbers, nbytes=1 << 20):
    await manager.store([(key(n), memoryview(value(n, nbytes))) for n in numbers])


def test_a_pinned_value_survives_an_eviction_storm_and_others_do_not(world):
    """Seen in LMCache#1388."""

    async def scene(manager, pins, clock):
        await fill(manager, 1, 2)
        count, nbytes = await pins.pin([key(1)], 60, deadline=None)
        assert (count, nbytes) == (1, pins.nbytes)
        for number in range(10, 60):
            await fill(manager, number)
        assert manager.pool.lengths([key(1), key(2)])[0] is not None
        assert manager.pool.lengths([key(2)]) == [None]

    world(scene)


def test_pins_never_exceed_their_share(world):
    async def scene(manager, pins, clock):
        await fill(manager, *range(1, 12))
        count, nbytes = await pins.pin([key(n) for n in range(1, 12)], 60, deadline=None)
        assert count == len(pins) == 3
        assert nbytes == pins.nbytes <= pins.limit == 4 << 20
        assert await pins.pin([key(9)], 60, deadline=None) == (0, nbytes)

    world(scene)


def test_pins_end_with_their_time_and_are_renewed(world):
    async def scene(manager, pins, clock):
        await fill(manager, 1, 2)
        await pins.pin([key(1), key(2)], 10, deadline=None)
        clock[0] += 6
        await pins.pin([key(2)], 10, deadline=None)
        clock[0] += 6
        pins.sweep()
        assert (key(1) in pins, key(2) in pins) == (False, True)

    world(scene)


def test_a_pin_does_not_keep_what_is_deleted(world):
    async def scene(manager, pins, clock):
        await fill(manager, 1)
        await pins.pin([key(1)], 60, deadline=None)
        await manager.clear()
        assert manager.pool.accounting().quarantined > 0
        pins.sweep()
        assert len(pins) == 0
        assert manager.pool.accounting().quarantined == 0

    world(scene)


def test_what_is_nowhere_is_passed_over_and_too_long_is_refused(world):
    async def scene(manager, pins, clock):
        await fill(manager, 2)
        assert (await pins.pin([key(1), key(2), key(2)], 60, deadline=None))[0] == 1
        assert pins.unpin([key(1), key(2)]) == 1
        with pytest.raises(ConfigError, match="a pin lasts at most"):
            await pins.pin([key(2)], LONGEST + 1, deadline=None)

    world(scene)
