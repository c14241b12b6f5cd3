"""What a serde shows at start before it may encode anything here."""

from __future__ import annotations

import math
import random
import struct

from lmcache_core.spi import Interior, Key, KVSpec, SegmentSpec, ValueInfo
from lmcache_core.wrappers import recode

WORST = 0.5
"""Relative root mean square error from which on it is a fault and no choice."""

_SPEC = KVSpec("bfloat16", 32, 2, 2, 64, Interior.ROWS, (SegmentSpec(0, 0, 2, 16384),))


def fault_of(serde: recode.Serde, /) -> str:
    """What is wrong with a serde, empty when nothing is.

    A lossless one gives back noise with every kind of bits and values of a bell curve; a lossy one gives
    back the latter within ``WORST``. Declining is no fault.
    """
    draw = random.Random(3)
    bell = struct.pack(f"<{8192}f", *(draw.gauss(0, 1) for _ in range(8192)))
    even = memoryview(bell).cast("H")[1::2].tobytes()
    info = ValueInfo(Key(bytes(32), bytes(range(32))), _SPEC, 0)
    for payload in (even, draw.randbytes(16384)) if serde.lossless else (even,):
        try:
            into, back = bytearray(recode.bound(serde, _SPEC, 16384)), bytearray(16384)
            nbytes = recode.encode(serde, info, memoryview(payload), memoryview(into))
            recode.decode(serde, info, memoryview(into)[:nbytes], memoryview(back))
        except ValueError:
            continue
        except Exception as error:  # noqa: BLE001 -- a plugin's first call: whatever it raises, it is not used
            return repr(error)
        if serde.lossless and back != payload:
            return "it does not give back what it was given"
        wanted = _where(back, payload) if serde.drops_tokens else payload
        if not serde.lossless and not (error_of(back, wanted) <= WORST):
            return f"error {error_of(back, wanted):.2f} of the values' size"
    return ""


def _where(found: bytes | bytearray, wanted: bytes) -> bytes:
    """The values that came back, zeros for those that were dropped."""
    pairs = ((found[at : at + 2], wanted[at : at + 2]) for at in range(0, len(wanted), 2))
    return b"".join(value if any(back) else b"\0\0" for back, value in pairs)


def error_of(found: bytes | bytearray, wanted: bytes) -> float:
    """Root mean square error of bfloat16 values relative to theirs; not a number where one is none."""
    a, b = (
        struct.unpack(f"<{len(data) // 2}f", b"".join(
            b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2)
        )) for data in (bytes(found), wanted)
    )  # fmt: skip
    total = sum(y * y for y in b)
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / total)
