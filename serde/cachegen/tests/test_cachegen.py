"""Both implementations, the ladder, positions and shards, damage, and tables that are not the right ones."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from lmcache_serde_cachegen import KltOptions, TablesFile, reference
from lmcache_serde_cachegen.config import LEVELS

from lmcache_core import ops
from lmcache_core.spi import ConfigError, Corrupt
from serde.cachegen.tests.model import (
    CODECS,
    DIM,
    HEADS,
    TOKENS,
    bfloat16,
    coded,
    floats,
    info_of,
    memory,
    restored,
    serde,
    spec_of,
    tables_in,
)  # fmt: skip

NATIVE = ops.extra("basis_encode") is not None
CASES = 50_000 if NATIVE else 200


@pytest.fixture
def path(tmp_path: Path) -> str:
    return tables_in(tmp_path)


def error(before: bytes, after: bytes) -> float:
    was, now = floats(before), floats(after)
    return float(np.sqrt(((was - now) ** 2).sum() / (was**2).sum()))


@pytest.mark.skipif(not NATIVE, reason="lmcache-native is not installed")
@pytest.mark.parametrize("element", [0, 1, 2])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("matrices", [False, True])
@pytest.mark.parametrize(("tokens", "dim", "group"), [(1, 16, 1), (37, 80, 10), (8, 128, 4)])
def test_both_implementations_give_the_same_bytes(
    element: int, interleaved: bool, matrices: bool, tokens: int, dim: int, group: int
) -> None:
    heads, draw = 2, np.random.default_rng(dim)
    channels = heads * dim

    def floats32(*shape: int) -> bytes:
        return draw.standard_normal(shape).astype("<f4").tobytes()

    shape = (heads, dim, dim) if matrices else (0,)
    basis = (floats32(heads, dim), floats32(*shape), floats32(*shape), heads, dim)
    steps = (0.02 + draw.random(channels) * 3).astype("<f4").tobytes()
    limits = draw.integers(1, 128, channels).astype("u1").tobytes()
    deltas = (255 * draw.integers(0, 2, channels)).astype("u1").tobytes() if group > 1 else b""
    turns = floats32(tokens, 2, dim // 4)
    values = draw.standard_normal(tokens * channels) * 3
    payload = {
        0: bfloat16(values), 1: values.astype("<f2").tobytes(), 2: values.astype("<f4").tobytes(),
    }[element]  # fmt: skip
    made = []
    for kind, encode, decode in (
        (ops.extra("Basis"), ops.extra("basis_encode"), ops.extra("basis_decode")),
        (reference.Basis, reference.basis_encode, reference.basis_decode),
    ):
        symbols, escapes = bytearray(3 + tokens * (channels + 5)), bytearray(2 * tokens * channels)
        chosen, back = kind(*basis), bytearray(len(payload))
        used = encode(
            chosen, payload, symbols, 3, channels + 5, escapes, steps, limits, deltas, group, 0.4,
            turns, interleaved, element, tokens,
        )  # fmt: skip
        assert used >= 0
        taken = decode(
            chosen, symbols, 3, channels + 5, escapes[:used], back, steps, limits, deltas, group,
            turns, interleaved, element, tokens,
        )  # fmt: skip
        assert taken == used
        made.append((symbols, escapes, back))
    assert made[0] == made[1]


@pytest.mark.parametrize("name", CODECS)
def test_every_level_takes_fewer_bytes_and_loses_more(name: str, path: str) -> None:
    payload, info = bfloat16(memory(9)[0]), info_of(spec_of(), 0)
    sizes, errors = [], []
    for level in range(1, LEVELS + 1):
        data = coded(serde(name, path, level=level), info, payload)
        sizes.append(len(data))
        errors.append(error(payload, restored(serde(name, path), info, data)))
    assert sizes == sorted(sizes, reverse=True)
    assert len({*sizes}) == LEVELS
    assert errors == sorted(errors)
    assert errors[-1] < 0.5


def test_keys_are_turned_back_by_their_positions(path: str) -> None:
    codec, sizes = serde("klt", path), []
    for first in (0, 70_000):
        payload, info = bfloat16(memory(9, first=first)[1]), info_of(spec_of(layer=1), first)
        data = coded(codec, info, payload)
        sizes.append(len(data))
        assert error(payload, restored(codec, info, data)) < 0.08
        if first:  # a wrong position costs bytes, or is refused; it does not cost values
            assert len(data) < 1.1 * sizes[0]
            unknown = info_of(spec_of(layer=1), -1)
            try:
                other = coded(codec, unknown, payload)
            except ValueError:
                continue
            assert len(other) > 1.2 * len(data)
            assert error(payload, restored(codec, unknown, other)) < 0.08


@pytest.mark.parametrize("name", CODECS)
def test_a_shard_of_the_heads_is_coded_by_itself(name: str, path: str) -> None:
    kv, codec = memory(9)[0], serde(name, path)
    whole = floats(
        restored(codec, info_of(spec_of()), coded(codec, info_of(spec_of()), bfloat16(kv)))
    )
    for head in range(HEADS):
        info = info_of(spec_of(heads=(head, head + 1)))
        back = restored(codec, info, coded(codec, info, bfloat16(kv[:, :, head : head + 1])))
        expected = whole.reshape(2, TOKENS, HEADS, DIM)[:, :, head]
        assert (floats(back).reshape(expected.shape) == expected).all()


@pytest.mark.parametrize("name", CODECS)
def test_what_the_tables_are_not_for_is_declined(name: str, path: str) -> None:
    codec, payload = serde(name, path), bytearray(bfloat16(memory(9)[0]))
    with pytest.raises(
        ValueError, match=r"not those the tables were made for|far outside|no fewer"
    ):
        coded(codec, info_of(spec_of()), bfloat16(floats(payload) * 1000))
    with pytest.raises(ValueError, match="know no layer 7"):
        coded(codec, info_of(spec_of(layer=7)), bytes(payload))
    payload[100:102] = b"\x80\x7f"
    with pytest.raises(ValueError, match="not finite"):
        coded(codec, info_of(spec_of()), bytes(payload))


def test_the_first_segment_of_a_layer_is_decoded_again(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, info, payload = serde("klt", path), info_of(spec_of()), bfloat16(memory(9)[0])
    monkeypatch.setattr("lmcache_serde_cachegen.serde.FAR", 0.001)
    with pytest.raises(ValueError, match="made for: error"):
        coded(codec, info, payload)
    monkeypatch.undo()
    coded(codec, info, payload)
    monkeypatch.setattr("lmcache_serde_cachegen.serde.FAR", 0.001)
    coded(codec, info, payload)


@pytest.mark.parametrize("name", CODECS)
def test_damage_is_refused_or_some_bytes(name: str, path: str) -> None:
    draw, info = random.Random(5), info_of(spec_of(tokens=8))
    codec, back = serde(name, path), memoryview(bytearray(info.spec.nbytes))
    good = coded(codec, info, bfloat16(memory(9, tokens=8)[0]))
    refused = 0
    for _ in range(CASES):
        bad = bytearray(good)
        bad[draw.randrange(len(bad) if draw.random() < 0.7 else 20)] ^= 1 << draw.randrange(8)
        if draw.random() < 0.2:
            del bad[draw.randrange(len(bad)) :]
        elif draw.random() < 0.1:
            bad += draw.randbytes(draw.randrange(9))
        try:
            codec.decode(info, memoryview(bad), back)
        except Corrupt:
            refused += 1
    assert refused > CASES // 2
    assert restored(codec, info, good) == restored(codec, info, good)


def test_values_of_other_tables_are_corrupt(path: str, tmp_path: Path) -> None:
    from lmcache_serde_cachegen import Klt

    draw = np.random.default_rng(8)
    kv = memory(4, tokens=240)
    data = Klt.calibrate([(kv, draw.standard_normal(kv.shape).astype("f4"))], [], model="another")
    (tmp_path / "other").write_bytes(data)
    info, other = info_of(spec_of()), serde("klt", str(tmp_path / "other"))
    made = coded(other, info, bfloat16(memory(9)[0]))
    with pytest.raises(Corrupt, match="made with tables"):
        restored(serde("klt", path), info, made)


def test_tables_that_cannot_be_used_are_one_line_each(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="klt needs tables of its model: lmcache calibrate"):
        CODECS["klt"][0](KltOptions())
    with pytest.raises(ConfigError, match="cannot be read"):
        KltOptions(tables=TablesFile.parse(str(tmp_path / "nothing")))
    (tmp_path / "text").write_text("once upon a time, there were no tables at all in this file")
    with pytest.raises(ConfigError, match="are no tables"):
        TablesFile.parse(str(tmp_path / "text"))
    data = bytearray(Path(path).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "damaged").write_bytes(data)
    with pytest.raises(ConfigError, match="are damaged"):
        TablesFile.parse(str(tmp_path / "damaged"))
    with pytest.raises(ConfigError, match="level is 1 to 5"):
        KltOptions(level=9)


def test_the_digest_names_the_tables_in_a_key_space(path: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(Path(path).read_bytes())
    one, same = TablesFile.parse(path), TablesFile.parse(str(tmp_path / "elsewhere"))
    assert one == same
    assert f"{one}" == f"{same}" == one.digest[:32]
    assert one != TablesFile()
