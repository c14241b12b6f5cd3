"""A hundred thousand damaged, cut and foreign inputs: refused or some bytes, never anything else."""

from __future__ import annotations

import random

import pytest
from lmcache_serde_lossless import X12, XR, X12Options, XROptions, Zstd, ZstdOptions

from lmcache_core import ops
from lmcache_core.spi import Corrupt, Key, ValueInfo
from lmcache_core.testing.serde import GUARD, bfloat16_noise, kv_spec

CASES = 33_334 if ops.extra("x12_decode") else 300
SPEC = kv_spec(tokens=24)
INFO = ValueInfo(Key(bytes(32), bytes(32)), SPEC)


def damage(draw: random.Random, good: bytes) -> bytes:
    kind, front = draw.randrange(8), draw.choice((len(good), 64))
    if kind < 4:
        bad = bytearray(good)
        for _ in range(1 + kind // 2 * 3):
            bad[draw.randrange(min(front, len(bad)))] ^= 1 << draw.randrange(8)
        return bytes(bad)
    if kind == 4:
        return good[: draw.randrange(len(good))]
    if kind == 5:
        return good + bytes(draw.randrange(1, 600))
    if kind == 6:
        at = draw.randrange(len(good))
        return good[:at] + draw.randbytes(16) + good[at + 16 :]
    return good[: draw.randrange(12)] + draw.randbytes(draw.randrange(len(good)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "serde", [X12(X12Options()), XR(XROptions()), Zstd(ZstdOptions())], ids=["x12", "xr", "zstd"]
)
def test_damage_is_refused_or_some_bytes(serde: X12 | XR | Zstd) -> None:
    draw, payload = random.Random(5), bfloat16_noise(SPEC.nbytes, 4)
    bound = serde.bound(SPEC.nbytes) if isinstance(serde, Zstd) else serde.bound(SPEC)
    coded = bytearray(bound)
    good = bytes(coded[: serde.encode(INFO, memoryview(payload), memoryview(coded))])
    room = bytearray(GUARD + bytes(SPEC.nbytes) + GUARD)
    into, refused = memoryview(room)[64 : 64 + SPEC.nbytes], 0
    for _ in range(CASES):
        bad = damage(draw, good)
        try:
            serde.decode(INFO, memoryview(bad), into)
        except Corrupt:
            refused += 1
    assert room[:64] == room[-64:] == GUARD
    assert refused > CASES / 4
    serde.decode(INFO, memoryview(good), into)
    assert into == payload
