"""Encoded values: the same frames back, or damage."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core.spi import BufferTooSmall, ConfigError, Corrupt, Load, Store
from lmcache_core.testing.contexts import simulated_context
from lmcache_core.testing.simulation import run_simulated
from lmcache_core.testing.worlds import (
    frame_nbytes,
    key_of,
    make_memory,
    payload_of,
    plain_frame,
)
from lmcache_core.wrappers import Chain, Check, CheckOptions, Encoded
from tests.wrappers.serdes import Declines, Double, Lossy, Squeeze

KEYS = [key_of(i) for i in range(5)]


def world():
    context = simulated_context(tier="t")
    return context, make_memory(context), []


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


def test_a_lossy_chain_is_sealed_over_what_was_decoded():
    context, memory, _ = world()
    backend = make_encoded(context, memory, Lossy())
    whole = plain_frame(KEYS[0], 5000)

    async def main():
        await backend.open()
        await backend.store([Store(KEYS[0], (memoryview(whole),))])
        result, room = await load_one(backend, KEYS[0], len(whole))
        assert result.error is None
        payload = bytes(room)[frame_nbytes(0) :]
        assert payload == bytes(b & 0xF0 for b in payload_of(KEYS[0], 5000))

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
