"""One serde on one segment, with what holds for all lossy ones: the first tokens of a prompt stay exact.

The first tokens receive most of the attention, and have small values that any coarse step destroys. Their
rows precede the bytes of a lossy serde: a count u32, then for each plane the rows of so many tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from lmcache_core.spi import BytesSerde, Corrupt, Interior, KVSpec, TensorSerde, ValueInfo

Serde = TensorSerde | BytesSerde
FLOATS = ("bfloat16", "float16", "float32")
"""Element types that a lossy serde may be offered."""
SPARE = 8
"""Buffers kept for the next values: fresh memory costs as much as encoding."""
_COUNT = struct.Struct("<I")


def takes(serde: Serde, spec: KVSpec, /) -> bool:
    """Whether a serde may be offered values of this form at all."""
    return serde.lossless or (spec.interior is Interior.ROWS and spec.dtype in FLOATS)


def bound(serde: Serde, form: KVSpec, nbytes: int, /) -> int:
    """Most bytes that ``encode`` can produce from ``nbytes``, which a segment of this form has become."""
    most = serde.bound(form) if isinstance(serde, TensorSerde) else serde.bound(nbytes)
    return most if serde.lossless else most + _COUNT.size + serde.exact_tokens * _row(form)[1]


def encode(serde: Serde, info: ValueInfo, source: memoryview, into: memoryview, /) -> int:
    """``serde.encode``, exact rows in front.

    Raises:
        ValueError: the serde declines.
    """
    if serde.lossless:
        return serde.encode(info, source, into)
    step, each = _row(info.spec)
    tokens = min(serde.exact_tokens, info.spec.tokens) if info.first_token <= 0 else 0
    _COUNT.pack_into(into, 0, tokens)
    at, size = _COUNT.size, tokens * each // info.spec.planes
    for plane in range(info.spec.planes if tokens else 0):
        into[at : at + size] = source[plane * step : plane * step + size]
        at += size
    return at + serde.encode(info, source, into[at:])


def decode(serde: Serde, info: ValueInfo, source: memoryview, into: memoryview, /) -> None:
    """The inverse.

    Raises:
        Corrupt: damaged.
    """
    if serde.lossless:
        return serde.decode(info, source, into)
    step, each = _row(info.spec)
    tokens = _COUNT.unpack_from(source)[0] if source.nbytes >= _COUNT.size else -1
    size, planes = tokens * each // info.spec.planes, info.spec.planes
    at = _COUNT.size + size * planes
    if not 0 <= tokens <= info.spec.tokens or source.nbytes < at or into.nbytes != step * planes:
        raise Corrupt(
            f"{info.key!r}: {tokens} exact tokens in {source.nbytes} bytes", operation="load"
        )
    serde.decode(info, source[at:], into)
    for plane in range(planes):
        begin = _COUNT.size + plane * size
        into[plane * step : plane * step + size] = source[begin : begin + size]


def parts(spec: KVSpec, /) -> list[KVSpec]:
    """The form of each segment alone."""
    return [replace(spec, segments=(segment,)) for segment in spec.segments]


def cut(view: memoryview, lengths: Sequence[int], /) -> list[memoryview]:
    """Consecutive pieces of these lengths."""
    return [view[a:b] for a, b in pairwise(accumulate(lengths, initial=0))]


class Spare:
    """Buffers for encoded values, from any thread."""

    def __init__(self) -> None:
        self._buffers: list[bytearray] = []

    def take(self, nbytes: int, /) -> bytearray:
        """At least so many bytes, their content undefined."""
        while self._buffers:
            try:
                buffer = self._buffers.pop()
            except IndexError:  # another thread was faster
                break
            if len(buffer) >= nbytes:
                return buffer
        return bytearray(nbytes)

    def give(self, *buffers: bytearray | None) -> None:
        """Nobody looks at them any more."""
        kept = [each for each in buffers if each is not None]
        self._buffers += kept[: max(0, SPARE - len(self._buffers))]


def _row(form: KVSpec) -> tuple[int, int]:
    """Bytes of one plane, and of one token over all planes."""
    return form.nbytes // form.planes, form.nbytes // form.tokens
