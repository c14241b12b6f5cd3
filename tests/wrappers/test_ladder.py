"""Several forms of a value in one: what is fetched, when which, and what damage does."""

from __future__ import annotations

import random
import struct

import pytest

from lmcache_core import frame
from lmcache_core.spi import (
    BufferTooSmall,
    ConfigError,
    Corrupt,
    Interior,
    KVSpec,
    Load,
    LoadStatus,
    Recoded,
    SegmentSpec,
    Store,
    Unavailable,
    Wrapper,
)
from lmcache_core.testing.contexts import simulated_context
from lmcache_core.testing.fakes import Flaky, Paced, Recording
from lmcache_core.testing.simulation import run_simulated
from lmcache_core.testing.worlds import key_of, make_memory, plain_frame
from lmcache_core.wrappers import Chain, Check, CheckOptions, Encoded, Ladder, LadderOptions
from lmcache_core.wrappers.ladder import FLYING
from lmcache_core.wrappers.link import Link
from tests.wrappers.serdes import High, Sealing, Squeeze

KEYS = [key_of(i) for i in range(40)]
SPEC = KVSpec(
    "bfloat16", 64, 2, 2, 64, Interior.ROWS,
    tuple(SegmentSpec(layer, 0, 2, 2 * 64 * 2 * 64 * 2) for layer in range(2)),
)  # fmt: skip
ROOM = frame.header_nbytes(2)
PLAIN, HALF = ROOM + SPEC.nbytes, ROOM + SPEC.nbytes // 2 + 2 * (4 + 4 * 512)
LEVELS = (Chain(serdes=()), Chain(serdes=(High(),)), Chain(serdes=(High(), Squeeze())))


def bell_frame(key, tags=()):
    """A frame of normally distributed values of two layers."""
    draw = random.Random(key.digest)
    noise = struct.pack("<2048f", *(draw.gauss(0, 1) for _ in range(2048)))
    room = frame.header_nbytes(2, tags=tags)
    part = memoryview(noise).cast("H")[1::2].tobytes()
    whole = memoryview(bytearray(bytes(room) + part * (SPEC.nbytes // len(part))))
    frame.seal_value(whole[:room], whole[room:], key, spec=SPEC, first=0, tags=tags)
    return bytes(whole)


class World:
    """A ladder behind a link."""

    def __init__(self, rate=1e12, *, levels=LEVELS, target=0.0):
        self.events = []
        self.context = simulated_context(tier="t", emit=self.events.append)
        self.memory = make_memory(self.context)
        self.faulty = Flaky(self.context, self.memory)
        self.calls = Recording(self.context, self.faulty)
        self.link = Paced(self.context, self.calls, rate if callable(rate) else lambda time: rate)
        options = LadderOptions(levels=levels, target=target)
        self.ladder = Ladder(options, self.context, self.link)
        self.backend = Check(CheckOptions(), self.context, self.ladder)

    async def store(self, keys=KEYS, wholes=None):
        await self.backend.open()
        wholes = wholes or [bell_frame(key) for key in keys]
        items = [Store(k, (memoryview(w),)) for k, w in zip(keys, wholes, strict=True)]
        assert not [each.error for each in await self.backend.store(items) if each.error]
        self.calls.calls.clear()

    async def load(self, keys=KEYS, nbytes=PLAIN):
        rooms = [memoryview(bytearray(nbytes)) for _ in keys]
        loads = [Load(key, (room,)) for key, room in zip(keys, rooms, strict=True)]
        return await self.backend.load(loads), rooms

    def used(self):
        """How many values were fetched at each level, by what was decoded."""
        found = {}
        for event in self.events:
            if isinstance(event, Recoded) and event.verb == "load":
                found[event.chain] = found.get(event.chain, 0) + event.values
        return found


def test_one_form_is_fetched_without_the_others():
    async def main():
        world = World(target=60.0)
        await world.store(KEYS[:2])
        await world.load(KEYS[:1])  # nothing was measured yet: the smallest
        assert world.used() == {"ladder.2": 1}
        index, smallest = (call.nbytes for call in world.calls.calls)
        assert index == 4096
        assert smallest < HALF
        world.calls.calls.clear()
        results, rooms = await world.load(KEYS[1:2])
        assert results[0].nbytes == PLAIN
        assert bytes(rooms[0]) == bell_frame(KEYS[1])  # there is time for the finest
        assert [call.nbytes for call in world.calls.calls] == [4096, PLAIN]

    run_simulated(main())


@pytest.mark.parametrize(
    ("target", "finest"),
    [(60.0, 0), (PLAIN * 40 / 1e6 * 1.2, 0), (HALF * 40 / 1e6 * 1.3, 1), (0.0, 2)],
)
def test_the_finest_form_that_arrives_in_time_is_fetched(target, finest):
    async def main():
        world = World(1e6, target=target)
        await world.store()
        await world.load(KEYS[:1])
        world.events.clear()
        begun = world.context.clock.now()
        results, rooms = await world.load()
        assert all(result.nbytes == PLAIN for result in results)
        took = world.context.clock.now() - begun
        if finest == 0:
            assert world.used() == {}  # plain values are not decoded
            assert [bytes(room) for room in rooms] == [bell_frame(key) for key in KEYS]
        else:
            assert max(world.used(), key=world.used().get) == f"ladder.{finest}"
        assert took <= target or finest == 2

    run_simulated(main())


def test_a_link_that_slows_down_half_way_gets_smaller_forms():
    async def main():
        world = World(lambda time: 1e7 if time < 0.8 else 1e6, target=1.8)
        await world.store()
        await world.load(KEYS[:1])
        begun = world.context.clock.now()
        await world.load()
        used = world.used()
        assert set(used) >= {"ladder.2"}
        assert used["ladder.2"] < len(KEYS) - 5  # the first ones came as they are
        assert world.context.clock.now() - begun < PLAIN * 40 / 1e6 / 1.5

    run_simulated(main())


def test_damage_in_one_form_leaves_the_others_good():
    async def main():
        world = World(1e3, target=0.0)
        await world.store(KEYS[:1])
        value = world.memory._values[KEYS[0]]
        stored = bytearray(value.content)
        stored[4096 + ROOM + 5000] ^= 1  # in the finest
        world.memory._values[KEYS[0]] = value._replace(content=bytes(stored))
        results, _ = await world.load(KEYS[:1])
        assert results[0].error is None
        world.ladder.target = 1e6
        results, _ = await world.load(KEYS[:1])
        assert isinstance(results[0].error, Corrupt)

    run_simulated(main())


def test_a_value_as_it_is_comes_where_it_belongs():
    async def main():
        world = World(1e9, target=60.0)
        await world.store(KEYS[:2])
        earlier = Encoded(LEVELS[1], world.context, world.memory)
        await earlier.open()
        await earlier.store([Store(KEYS[2], (memoryview(bell_frame(KEYS[2])),))])
        await world.load(KEYS[:1])
        spare, taken = world.ladder.coder.spare.take, []
        world.ladder.coder.spare.take = lambda nbytes: taken.append(nbytes) or spare(nbytes)
        results, rooms = await world.load(KEYS[1:2])
        assert (results[0].error, bytes(rooms[0])) == (None, bell_frame(KEYS[1]))
        assert taken == []
        results, rooms = await world.load(
            KEYS[2:3]
        )  # another configuration's: encoded all the same
        assert (results[0].error, results[0].nbytes) == (None, PLAIN)
        assert frame.open_header(rooms[0], KEYS[2]).chain == ()

    run_simulated(main())


def test_few_values_travel_while_more_are_decoded(monkeypatch):
    monkeypatch.setattr("lmcache_core.wrappers.ladder.GROUP_NBYTES", 1)

    class Counting(Wrapper):
        flying = most = 0

        async def load(self, batch, /, **options):
            self.flying += 1
            self.most = max(self.most, self.flying)
            results = await self.inner.load(batch, **options)
            self.flying -= 1
            return results

    async def main():
        world = World(1e6)
        await world.store()
        world.ladder.inner = counting = Counting(None, world.context, world.link)
        await counting.open()
        began, decoded = [], world.ladder.coder.decode
        world.ladder.coder.decode = lambda load, stored: (
            began.append(load.key) or decoded(load, stored)
        )
        results, _ = await world.load()
        assert {each.status.value for each in results} == {"filled"}
        assert (len(began), counting.most) == (len(KEYS), FLYING)

    run_simulated(main())


def test_what_fails_or_is_missing_fails_alone():
    async def main():
        world = World()
        await world.store(KEYS[:3])
        keys = [KEYS[0], KEYS[9], KEYS[1]]
        results, _ = await world.load(keys)
        assert [each.status.value for each in results] == ["filled", "missed", "filled"]
        world.faulty.failures = [Unavailable("gone")]
        results, _ = await world.load([*KEYS[:2]])
        assert {type(each.error) for each in results} == {Unavailable}
        results, _ = await world.load(KEYS[:1], PLAIN - 1)
        assert isinstance(results[0].error, BufferTooSmall)

    run_simulated(main())


def test_a_value_of_which_one_form_pays_is_an_ordinary_frame():
    async def main():
        world = World()
        whole = plain_frame(KEYS[0], 5000)  # opaque noise: nothing makes it smaller
        await world.store(KEYS[:1], [whole])
        assert world.memory._values[KEYS[0]].content == whole
        results, rooms = await world.load(KEYS[:1], len(whole))
        assert (results[0].error, bytes(rooms[0])) == (None, whole)

    run_simulated(main())


def test_lengths_before_encoding_are_read_from_headers():
    async def main():
        world = World()
        tags = [f"{n:x}" * 250 for n in range(16)]
        wholes = [bell_frame(KEYS[0]), bell_frame(KEYS[1], tags)]
        await world.store(KEYS[:2], wholes)
        lengths = await world.ladder.frame_lengths(KEYS[:3], None)
        assert lengths == [len(wholes[0]), len(wholes[1]), None]
        assert all(call.nbytes < 6 * 4096 for call in world.calls.calls)
        most = world.ladder.bound(memoryview(wholes[1]), KEYS[1])
        assert len(world.memory._values[KEYS[1]].content) <= most
        assert await world.backend.delete(KEYS[:1]) == 1
        assert await world.ladder.frame_lengths(KEYS[:1], None) == [None]

    run_simulated(main())


def test_a_ladder_is_damage_to_who_does_not_know_it():
    async def main():
        world = World()
        await world.store(KEYS[:1])
        header = frame.open_header(memoryview(world.memory._values[KEYS[0]].content))
        assert (header.chain, header.approximate) == (("ladder",), True)
        other = Encoded(Chain(serdes=(Squeeze(),)), world.context, world.memory)
        await other.open()
        result = (await other.load([Load(KEYS[0], (memoryview(bytearray(PLAIN)),))]))[0]
        assert result.status is LoadStatus.FAILED
        assert isinstance(result.error, Corrupt)

    run_simulated(main())


def test_a_store_without_parts_has_no_ladder():
    class Whole(Wrapper):
        async def open(self):
            await super().open()
            self.capabilities = type(self.capabilities)()

    async def main():
        context = simulated_context(tier="t")
        options = LadderOptions(levels=LEVELS)
        ladder = Ladder(options, context, Whole(None, context, make_memory(context)))
        with pytest.raises(ConfigError, match="'t' cannot load parts of values"):
            await ladder.open()

    run_simulated(main())


def test_what_is_required_is_in_every_level():
    context = simulated_context(tier="t")
    levels = (Chain(serdes=(Sealing(),)), Chain(serdes=(Squeeze(),)))
    with pytest.raises(ConfigError, match="sealing"):
        Ladder(LadderOptions(levels=levels), context, make_memory(context))


def test_the_choice_weighs_the_link_against_decoding():
    link = Link(1)
    assert link.choose([90, 50, 10], 0, 100, 0.0) == 2
    link.arrived(100, 0.0, 1.0)
    assert link.choose([90, 50, 10], 0, 100, 0.0) == 2
    assert link.choose([90, 50, 10], 0, 100, 0.55) == 1
    assert link.choose([90, 50, 10], 20, 100, 0.55) == 2  # what is on its way counts too
    assert link.choose([11, 10.6, 10.4], 0, 100, 0.0) == 1  # as good as the quickest
    for level, seconds in ((1, 0.6), (2, 0.8)):
        link.decoded(level, 100, seconds)
    assert link.choose([90, 50, 10], 0, 100, 0.0) == 1
    assert link.choose([55, 50, 10], 0, 100, 0.0) == 0
