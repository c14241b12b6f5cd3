"""Buffers that no model makes: every bit pattern comes back, or the buffer is declined.

``LMCACHE_CASES=50000`` plays a hundred thousand, half of them with each serde.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest
from lmcache_serde_lossless import X12, XR, X12Options, XROptions

from lmcache_core import ops
from lmcache_core.spi import Interior, Key, KVSpec, SegmentSpec, ValueInfo

CASES = int(os.environ.get("LMCACHE_CASES", "4000" if ops.extra("x12_decode") else "300"))
SHAPES = [(1, 1, 1), (1, 2, 5), (3, 1, 8), (7, 2, 16), (16, 1, 33), (40, 2, 16)]
"""Tokens, heads, elements of a head."""
NBYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}
ODD = [
    b"\x80\x7f", b"\x80\xff", b"\x81\x7f", b"\xc1\xff", b"\xff\x7f",  # infinities, NaNs with payloads
    b"\x00\x80", b"\x00\x00", b"\x01\x00", b"\x7f\x80", b"\x7f\x7f", b"\x80\x00",  # zeros, denormals, ends
]  # fmt: skip


def info(dtype: str, shape: tuple[int, int, int]) -> ValueInfo:
    tokens, heads, dim = shape
    nbytes = 2 * tokens * heads * dim * NBYTES[dtype]
    segment = SegmentSpec(0, 0, heads, nbytes)
    spec = KVSpec(dtype, tokens, 2, heads, dim, Interior.ROWS, (segment,))
    return ValueInfo(Key(bytes(32), bytes(32)), spec)


def buffer(draw: random.Random, nbytes: int) -> bytes:
    """Noise, odd values, one exponent with exceptions, all exponents in turn, long runs."""
    kind, count = draw.randrange(6), nbytes // 2 + 1
    if kind == 0:
        return draw.randbytes(nbytes)
    if kind == 1:
        return b"".join(draw.choices(ODD, k=count))[:nbytes]
    if kind == 2:
        plain = bytearray(draw.randbytes(1) + b"\x3f") * count
        for _ in range(draw.randrange(1, 9)):
            plain[draw.randrange(len(plain))] = draw.randrange(256)
        return bytes(plain[:nbytes])
    if kind == 3:
        step = draw.randrange(1, 256)
        return bytes(at * step & 0xFF for at in range(nbytes))
    if kind == 4:
        few = [draw.randbytes(2) for _ in range(draw.choice((2, 15, 16, 17)))]
        return b"".join(draw.choices(few, k=count))[:nbytes]
    at = draw.randrange(nbytes + 1)
    return draw.randbytes(1) * at + draw.randbytes(1) * (nbytes - at)


@pytest.mark.parametrize(
    ("serde", "dtypes"),
    [(X12(X12Options()), ["bfloat16"]), (XR(XROptions()), list(NBYTES))],
    ids=["x12", "xr"],
)
def test_every_bit_of_an_odd_buffer_comes_back(serde: X12 | XR, dtypes: Sequence[str]) -> None:
    draw, coded = random.Random(6), 0
    forms = []
    for about in [info(dtype, shape) for dtype in dtypes for shape in SHAPES]:
        rooms = bytearray(serde.bound(about.spec)), bytearray(about.spec.nbytes)
        forms.append((about, memoryview(rooms[0]), memoryview(rooms[1])))
    for case in range(CASES):
        about, into, back = forms[case % len(forms)]
        payload = buffer(draw, about.spec.nbytes)
        try:
            nbytes = serde.encode(about, memoryview(payload), into)
        except ValueError:
            continue
        serde.decode(about, into[:nbytes], back)
        assert back == payload, (about.spec, payload.hex())
        coded += 1
    assert coded > CASES / 4
