"""Both implementations, options, and what is refused."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
from lmcache_serde_quant import MODES, Quant, QuantOptions, reference
from lmcache_serde_quant.config import PlaneCode

from lmcache_core import ops
from lmcache_core.spi import ConfigError, Corrupt, Key, KVSpec, ValueInfo
from lmcache_core.testing.serde import bfloat16_noise, kv_spec

KEY = Key(bytes(32), bytes(range(32)))


def encoded(serde: Quant, spec: KVSpec, payload: bytes) -> bytes:
    into = bytearray(serde.bound(spec))
    return bytes(into[: serde.encode(ValueInfo(KEY, spec), memoryview(payload), memoryview(into))])


@pytest.mark.skipif(ops.extra("quant_encode") is None, reason="lmcache-native is not installed")
@pytest.mark.parametrize("code", list(PlaneCode))
@pytest.mark.parametrize("element", [0, 1, 2])
@pytest.mark.parametrize(("tokens", "dim"), [(1, 8), (37, 64), (70, 128), (33, 80)])
def test_both_implementations_give_the_same_bytes(
    code: PlaneCode, element: int, tokens: int, dim: int
) -> None:
    heads, group, draw = 2, 16, np.random.default_rng(code)
    values = (draw.standard_normal(tokens * heads * dim) * 2.0 ** draw.integers(-20, 8)).astype(
        "<f4"
    )
    values[:: 7 * dim] = 0
    payload = {
        0: (values.view("<u4") >> 16).astype("<u2").tobytes(),
        1: values.astype("<f2").tobytes(),
        2: values.tobytes(),
    }[element]
    size = reference.nbytes(code, tokens, heads, dim, group)
    assert ops.extra("quant_nbytes")(code, tokens, heads, dim, group) == size
    made, shape = [], (tokens, heads, dim, group)
    for encode in (ops.extra("quant_encode"), reference.encode):
        into = bytearray(size)
        assert encode(code, element, memoryview(payload), memoryview(into), *shape)
        made.append(bytes(into))
    assert made[0] == made[1]
    for coded in (made[0], random.Random(code).randbytes(size)):
        back = []
        for decode in (ops.extra("quant_decode"), reference.decode):
            into = bytearray(len(payload))
            decode(code, element, memoryview(coded), memoryview(into), *shape)
            back.append(np.frombuffer(into, "<f2" if element == 1 else "<u4" if element else "<u2"))
        if coded is made[0]:
            assert (back[0].view("u1") == back[1].view("u1")).all()


@pytest.mark.parametrize("mode", sorted(MODES))
def test_what_is_not_finite_is_declined(mode: str) -> None:
    spec = kv_spec()
    payload = bytearray(bfloat16_noise(spec.nbytes, 1))
    payload[-2:] = struct.pack("<H", 0x7F80)
    with pytest.raises(ValueError, match="not finite"):
        encoded(Quant(QuantOptions(mode=mode)), spec, bytes(payload))


def test_exact_layers_stay_as_they_are() -> None:
    spec = kv_spec(layer=3)
    payload = bfloat16_noise(spec.nbytes, 1)
    made = encoded(Quant(QuantOptions(exact_layers=(0, 3))), spec, payload)
    back = bytearray(spec.nbytes)
    Quant(QuantOptions(mode="int4")).decode(
        ValueInfo(KEY, spec), memoryview(made), memoryview(back)
    )
    assert back == payload


def test_any_instance_decodes_what_another_encoded() -> None:
    spec = kv_spec(tokens=100)
    payload = bfloat16_noise(spec.nbytes, 1)
    for mode in MODES:
        made = encoded(Quant(QuantOptions(mode=mode, group=24)), spec, payload)
        results = []
        for other in (QuantOptions(mode=mode), QuantOptions(mode="int8", group=7)):
            back = bytearray(spec.nbytes)
            Quant(other).decode(ValueInfo(KEY, spec), memoryview(made), memoryview(back))
            results.append(back)
        assert results[0] == results[1]


def test_damage_is_detected_or_harmless() -> None:
    """A frame's digest finds every change before a decoder sees it; this is the second line."""
    draw = random.Random(5)
    spec = kv_spec(tokens=8)
    serde = Quant(QuantOptions())
    info, back = ValueInfo(KEY, spec), memoryview(bytearray(spec.nbytes))
    good = encoded(serde, spec, bfloat16_noise(spec.nbytes, 1))
    refused = 0
    for _ in range(20_000):
        bad = bytearray(good)
        bad[draw.randrange(len(bad) if draw.random() < 0.5 else 8)] ^= 1 << draw.randrange(8)
        if draw.random() < 0.3:
            del bad[draw.randrange(len(bad)) :]
        try:
            serde.decode(info, memoryview(bad), back)
        except Corrupt:
            refused += 1
    assert refused > 8_000


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "k8v4"}, "did you mean"),
        ({"mode": "zzz"}, "not one of"),
        ({"group": -1}, "0 to 65535"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        QuantOptions(**options)  # type: ignore[arg-type]
