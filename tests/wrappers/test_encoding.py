"""Encoded values: the same frames back, or damage."""

from __future__ import annotations

import random
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core import frame
from lmcache_core.spi import (
    BufferTooSmall,
    ConfigError,
    Corrupt,
    Interior,
    KVSpec,
    Load,
    Recoded,
    SegmentSpec,
    Store,
)
from lmcache_core.testing.contexts import simulated_context
from lmcache_core.testing.simulation import run_simulated
from lmcache_core.testing.worlds import (
    key_of,
    make_memory,
    plain_frame,
)
from lmcache_core.wrappers import Chain, Check, CheckOptions, Encoded
from tests.wrappers.serdes import (
    Broken,
    Declines,
    Double,
    Lossy,
    Sealing,
    SealingBadly,
    SealingNothing,
    Squeeze,
)

KEYS = [key_of(i) for i in range(5)]


def world():
    events = []
    context = simulated_context(tier="t", emit=events.append)
    return context, make_memory(context), events


async def load_one(backend, key, nbytes):
    room = memoryview(bytearray(nbytes))
    return (await backend.load([Load(key, (room,))]))[0], room


def make_encoded(context, memory, *serdes, known=()):
    return Check(
        CheckOptions(), context, Encoded(Chain(serdes=serdes, known=known), context, memory)
    )


@pytest.mark.parametrize(
    "serdes", [(Squeeze(),), (Double(), Squeeze()), (Squeeze(), Squeeze()), (Declines(),)]
)
@pytest.mark.parametrize("nbytes", [1, 5000, 300_000])
def test_a_lossless_chain_gives_the_same_frame_back(serdes, nbytes):
    context, memory, _ = world()
    backend = make_encoded(context, memory, *serdes)
    whole = plain_frame(KEYS[0], nbytes, ["tag"])

    async def main():
        await backend.open()
        assert (await backend.store([Store(KEYS[0], (memoryview(whole),))]))[0].error is None
        found = (await memory.lookup([KEYS[0]]))[0]
        assert found.nbytes <= backend.inner.bound(memoryview(whole), KEYS[0])
        result, room = await load_one(backend, KEYS[0], len(whole))
        assert (result.error, result.nbytes) == (None, len(whole))
        assert bytes(room) == whole
        assert await backend.inner.frame_lengths(KEYS[:2], None) == [len(whole), None]
        assert isinstance(
            (await load_one(backend, KEYS[0], len(whole) - 1))[0].error, BufferTooSmall
        )

    run_simulated(main())


def rows_frame(first, dtype="bfloat16", layers=3, tokens=16):
    """A frame of noise of several layers, one head of four elements."""
    segments = tuple(SegmentSpec(layer, 0, 1, 2 * tokens * 8) for layer in range(layers))
    spec = KVSpec(dtype, tokens, 2, 1, 4, Interior.ROWS, segments)
    room = frame.header_nbytes(layers)
    whole = bytearray(room) + random.Random(first).randbytes(spec.nbytes)
    view = memoryview(whole)
    frame.seal_value(view[:room], view[room:], KEYS[0], spec=spec, first=first)
    return bytes(whole)


@pytest.mark.parametrize("first", [0, 256, -1])
@pytest.mark.parametrize("chain", [(Lossy(),), (Lossy(), Squeeze())])
def test_a_lossy_chain_keeps_the_first_tokens_of_a_prompt(first, chain):
    context, memory, _ = world()
    backend = make_encoded(context, memory, *chain)
    whole = rows_frame(first)

    async def main():
        await backend.open()
        await backend.store([Store(KEYS[0], (memoryview(whole),))])
        stored = frame.open_header(memoryview(memory._values[KEYS[0]].content))
        assert (stored.approximate, stored.first) == (True, first)
        result, room = await load_one(backend, KEYS[0], len(whole))
        assert result.error is None
        header = frame.open_header(room, KEYS[0])
        frame.verify(header, room[header.nbytes :])
        assert (header.approximate, header.first, header.chain) == (False, first, ())
        found, given = bytes(room)[header.nbytes :], whole[header.nbytes :]
        for plane in range(6):
            for token in range(16):
                at = (plane * 16 + token) * 8
                row = given[at : at + 8]
                if first > 0 or token >= 4:
                    row = bytes(b if i % 2 else b & 0xF0 for i, b in enumerate(row))
                assert found[at : at + 8] == row

    run_simulated(main())


@pytest.mark.parametrize("whole", [rows_frame(0, dtype="int16"), plain_frame(KEYS[0], 5000)])
def test_a_lossy_serde_is_offered_rows_of_floats_only(whole):
    context, memory, _ = world()
    backend = make_encoded(context, memory, Lossy())

    async def main():
        await backend.open()
        await backend.store([Store(KEYS[0], (memoryview(whole),))])
        assert memory._values[KEYS[0]].content == whole

    run_simulated(main())


def test_a_segment_is_found_and_decoded_alone():
    context, memory, _ = world()
    backend = make_encoded(context, memory, Squeeze())
    whole = rows_frame(0)

    async def main():
        await backend.open()
        await backend.store([Store(KEYS[0], (memoryview(whole),))])
        stored = memoryview(memory._values[KEYS[0]].content)
        header = frame.open_header(stored)
        begin = header.nbytes + sum(header.stored[:2])
        part = stored[begin : begin + header.stored[2]]
        frame.verify_segment(header, 2, memoryview(zlib.decompress(part)))
        assert header.nbytes + header.stored_nbytes == stored.nbytes

    run_simulated(main())


def test_a_serde_that_fails_its_test_is_left_out_by_name(caplog):
    """Seen in LMCache#4924."""
    context, memory, events = world()
    backend = make_encoded(context, memory, Broken(), Squeeze())
    whole = rows_frame(0)

    async def main():
        await backend.open()
        assert "tier 't': serde 'broken' fails its self-test (it does not give back" in caplog.text
        assert [(event.tier, event.serde) for event in events] == [("t", "broken")]
        await backend.store([Store(KEYS[0], (memoryview(whole),))])
        stored = frame.open_header(memoryview(memory._values[KEYS[0]].content))
        assert stored.chain == ("squeeze",)
        with pytest.raises(ConfigError, match="'badly' fails its self-test"):
            await make_encoded(context, memory, SealingBadly()).open()

    run_simulated(main())


def test_what_is_required_is_never_left_out():
    context, memory, _ = world()
    whole = rows_frame(0)

    async def main():
        refusing = make_encoded(context, memory, SealingNothing())
        await refusing.open()
        results = await refusing.store([Store(KEYS[0], (memoryview(whole),))])
        assert "declines" in str(results[0].error)
        assert not memory._values
        plain = make_encoded(context, memory, Squeeze())
        await plain.open()
        await plain.store([Store(KEYS[0], (memoryview(whole),))])
        strict = make_encoded(context, memory, Squeeze(), Sealing())
        await strict.open()
        result, _ = await load_one(strict, KEYS[0], len(whole))
        assert isinstance(result.error, Corrupt)
        assert "is not sealing as required" in str(result.error)

    run_simulated(main())


def test_an_approximate_value_is_refused_where_all_is_exact():
    context, memory, _ = world()
    whole = rows_frame(0)

    async def main():
        lossy = make_encoded(context, memory, Lossy())
        await lossy.open()
        await lossy.store([Store(KEYS[0], (memoryview(whole),))])
        exact = make_encoded(context, memory, Squeeze(), known=(Lossy(),))
        await exact.open()
        result, _ = await load_one(exact, KEYS[0], len(whole))
        assert isinstance(result.error, Corrupt)
        assert "approximate" in str(result.error)

    run_simulated(main())


def test_what_was_recoded_is_told_once_per_batch():
    context, memory, events = world()
    backend = make_encoded(context, memory, Double())
    whole = rows_frame(0)

    async def main():
        await backend.open()
        await backend.store([Store(KEYS[0], (memoryview(whole),))])
        await load_one(backend, KEYS[0], len(whole))
        told = [(e.verb, e.chain, e.values, e.raw) for e in events if isinstance(e, Recoded)]
        assert told == [(verb, "double", 1, 768) for verb in ("store", "load")]
        assert {event.stored for event in events} == {4096 + 2 * 768}

    run_simulated(main())


def test_an_unknown_encoding_is_damage_and_a_known_one_is_read():
    context, memory, _ = world()
    old = make_encoded(context, memory, Squeeze())
    whole = plain_frame(KEYS[0], 500)

    async def main():
        await old.open()
        await old.store([Store(KEYS[0], (memoryview(whole),))])
        stranger = make_encoded(context, memory, Double())
        await stranger.open()
        result, _ = await load_one(stranger, KEYS[0], len(whole))
        assert isinstance(result.error, Corrupt)
        assert "squeeze" in str(result.error)
        friend = make_encoded(context, memory, Double(), known=(Squeeze(),))
        await friend.open()
        assert (await load_one(friend, KEYS[0], len(whole)))[0].error is None
        asked = Chain(serdes=(Double(),), find=lambda wire_id: Squeeze())
        finder = Encoded(asked, context, memory)
        await finder.open()
        assert (await load_one(finder, KEYS[0], len(whole)))[0].error is None

    run_simulated(main())


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_damaged_encoded_bytes_never_get_through(data):
    context, memory, _ = world()
    backend = make_encoded(context, memory, Double(), Squeeze())
    whole = plain_frame(KEYS[0], 700)

    async def main():
        await backend.open()
        await backend.store([Store(KEYS[0], (memoryview(whole),))])
        value = memory._values[KEYS[0]]
        stored = bytearray(value.content)
        stored[data.draw(st.integers(0, len(stored) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        memory._values[KEYS[0]] = value._replace(content=bytes(stored))
        assert isinstance((await load_one(backend, KEYS[0], len(whole)))[0].error, Corrupt)

    run_simulated(main())


def test_a_serde_of_elements_comes_first():
    context, memory, _ = world()
    with pytest.raises(ConfigError, match="write it first"):
        make_encoded(context, memory, Squeeze(), Double())
