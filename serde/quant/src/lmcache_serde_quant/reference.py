"""The codes of one plane in numpy: their specification, and what runs where the native part is missing.

A plane is ``[token][head][dim]``, a row one token's head, R rows in all; all arithmetic is IEEE single
precision in the order written here, so every implementation gives the same bytes. ``f16`` is rounding to half
precision. Numbers are little-endian.

* ``int8_row``: R scales f16(largest / 127); codes i8.
* ``int8_channel``: for each group of tokens and channel, the same; all scales first.
* ``int4_row``: R pairs of scale f16(range / 15) and zero f16(smallest); codes of 4 bits, the first half of the row
  in the lower halves of its bytes. ``int4_channel`` likewise per group and channel (all scales of a group, then
  all zeros), the first half of a group's tokens in the lower halves.
* ``int4_hadamard``, ``int3_hadamard``: rows times signs / sqrt(W), then a Hadamard transform of each W elements
  (W: the largest power of two in dim, at most 256). 3 bits: two lower bits of four quarters, then the upper bit
  of eight eighths.
* ``normal4``, ``normal3``: the same transform; R scales f16; codes of levels of a normal distribution
  (J. Max, 1960); the scale gives the row its length back.
* ``e4m3``, ``e5m2``: a float32 scale for each head, then OCP 8-bit floats.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmcache_serde_quant.config import PlaneCode

Array = NDArray[Any]
F = np.float32
MOST_DIM = 1024
LARGEST = np.uint32(0x7149F2CA).view(F)
"""1e30: what a rotation still adds up."""
LEVELS = {
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
}


def nbytes(code: int, tokens: int, heads: int, dim: int, group: int) -> int:
    """Encoded length of a plane.

    Raises:
        ValueError: the code is not for such a plane.
    """
    rows, channels, groups = tokens * heads, heads * dim, -(-tokens // max(1, group))
    if not (rows and group) or dim % 8 or not 0 < dim <= MOST_DIM:
        raise ValueError(f"no plane of {tokens} tokens, {heads} heads of {dim}, groups of {group}")
    every = rows * dim
    half = sum((len(part) + 1) // 2 for part in _groups(tokens, group))
    return {
        PlaneCode.INT8_ROW: 2 * rows + every,
        PlaneCode.INT8_CHANNEL: 2 * channels * groups + every,
        PlaneCode.INT4_ROW: 4 * rows + every // 2,
        PlaneCode.INT4_HADAMARD: 4 * rows + every // 2,
        PlaneCode.INT4_CHANNEL: 4 * channels * groups + channels * half,
        PlaneCode.INT3_HADAMARD: 4 * rows + every // 8 * 3,
        PlaneCode.NORMAL4: 2 * rows + every // 2,
        PlaneCode.NORMAL3: 2 * rows + every // 8 * 3,
        PlaneCode.E4M3: 4 * heads + every,
        PlaneCode.E5M2: 4 * heads + every,
    }[PlaneCode(code)]


@np.errstate(all="ignore")
def encode(
    code: int, element: int, source: memoryview, into: memoryview, tokens: int, heads: int,
    dim: int, group: int,
) -> bool:  # fmt: skip
    """Fill ``into`` (of ``nbytes``); False: an element is not finite, or has no scale."""
    x = _load(source, element).reshape(tokens * heads, dim)
    largest = LARGEST if code in (4, 6, 7, 8) else np.inf
    if not (np.abs(x) < largest).all():
        return False
    parts: list[Array]
    match PlaneCode(code):
        case PlaneCode.INT8_ROW:
            scale = _half(np.abs(x).max(1) * F(1 / 127))
            parts = [scale, _round(x * _inverse(scale)[:, None], -127, 127).astype(np.int8)]
        case PlaneCode.INT8_CHANNEL:
            parts = _channels(x.reshape(tokens, -1), group, 8)
        case PlaneCode.INT4_CHANNEL:
            parts = _channels(x.reshape(tokens, -1), group, 4)
        case PlaneCode.INT4_ROW | PlaneCode.INT4_HADAMARD | PlaneCode.INT3_HADAMARD:
            bits = 3 if code == PlaneCode.INT3_HADAMARD else 4
            y = x if code == PlaneCode.INT4_ROW else _hadamard(x * _signs(dim))
            low, top = y.min(1), (1 << bits) - 1
            pair = _half(np.stack(((y.max(1) - low) * F(1 / F(top)), low), 1))
            codes = (y - pair[:, 1:].astype(F)) * _inverse(pair[:, :1])
            parts = [pair, _pack(_round(codes, 0, top), bits)]
        case PlaneCode.NORMAL4 | PlaneCode.NORMAL3:
            bits = 3 if code == PlaneCode.NORMAL3 else 4
            parts = _normal(_hadamard(x * _signs(dim)), bits)
        case PlaneCode.E4M3 | PlaneCode.E5M2:
            parts = _fp8(x.reshape(tokens, heads, dim), 3 if code == PlaneCode.E4M3 else 2)
    halves = [part for part in parts if part.dtype == np.float16]
    if not all(np.isfinite(part).all() for part in halves):
        return False
    into[:] = b"".join(part.tobytes() for part in parts)
    return True


@np.errstate(all="ignore")
def decode(
    code: int, element: int, source: memoryview, into: memoryview, tokens: int, heads: int,
    dim: int, group: int,
) -> None:  # fmt: skip
    """Fill ``into`` from ``nbytes`` bytes; any bytes give some numbers."""
    raw, rows = np.frombuffer(source, np.uint8), tokens * heads
    match PlaneCode(code):
        case PlaneCode.INT8_ROW:
            scale, codes = raw[: 2 * rows].view("<f2").astype(F), raw[2 * rows :].view(np.int8)
            x = codes.reshape(rows, dim).astype(F) * scale[:, None]
        case PlaneCode.INT8_CHANNEL:
            x = _from_channels(raw, tokens, heads * dim, group, 8)
        case PlaneCode.INT4_CHANNEL:
            x = _from_channels(raw, tokens, heads * dim, group, 4)
        case PlaneCode.INT4_ROW | PlaneCode.INT4_HADAMARD | PlaneCode.INT3_HADAMARD:
            pair = raw[: 4 * rows].view("<f2").reshape(rows, 2).astype(F)
            bits = 3 if code == PlaneCode.INT3_HADAMARD else 4
            x = _unpack(raw[4 * rows :].reshape(rows, -1), bits) * pair[:, :1] + pair[:, 1:]
            if code != PlaneCode.INT4_ROW:
                x = _hadamard(x) * _signs(dim)
        case PlaneCode.NORMAL4 | PlaneCode.NORMAL3:
            bits = 3 if code == PlaneCode.NORMAL3 else 4
            codes = _unpack(raw[2 * rows :].reshape(rows, -1), bits).astype(np.intp)
            x = _levels(bits)[codes] * raw[: 2 * rows].view("<f2").astype(F)[:, None]
            x = _hadamard(x) * _signs(dim)
        case PlaneCode.E4M3 | PlaneCode.E5M2:
            scale = raw[: 4 * heads].view("<f4")
            table = _fp8_values(3 if code == PlaneCode.E4M3 else 2)
            x = table[raw[4 * heads :].reshape(tokens, heads, dim)] * scale[:, None]
    _store(x.astype(F, copy=False).reshape(-1), element, into)


# -- elements


def _load(source: memoryview, element: int) -> Array:
    if element == 0:
        return (np.frombuffer(source, "<u2").astype(np.uint32) << 16).view(F)
    return np.frombuffer(source, "<f2" if element == 1 else "<f4").astype(F)


def _store(x: Array, element: int, into: memoryview) -> None:
    if element:
        into[:] = x.astype("<f2" if element == 1 else "<f4").tobytes()
        return
    bits = x.view(np.uint32)
    into[:] = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()


def _half(x: Array) -> Array:
    return x.astype("<f2")


def _inverse(scale: Array) -> Array:
    wide = scale.astype(F)
    return np.where(wide > 0, F(1) / wide, F(0))


def _round(x: Array, low: float, high: float) -> Array:
    return np.rint(np.minimum(np.maximum(x, F(low)), F(high)))


# -- rotation


@cache
def _signs(dim: int) -> Array:
    """One sign for each element, divided by the square root of the transform's width (splitmix64)."""
    mask, words = (1 << 64) - 1, []
    for word in range(-(-dim // 64)):
        z = (word + 1) * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        words.append(z ^ z >> 31)
    norm = F(1) / np.sqrt(F(_width(dim)))
    return np.array([-norm if words[i // 64] >> i % 64 & 1 else norm for i in range(dim)], F)


def _width(dim: int) -> int:
    return min(dim & -dim, 256)


def _hadamard(x: Array) -> Array:
    width = _width(x.shape[1])
    y = x.reshape(-1, width)
    for _ in range(width.bit_length() - 1):
        a, b = y[:, : width // 2], y[:, width // 2 :]
        y = np.stack((a + b, a - b), 2).reshape(-1, width)
    return y.reshape(x.shape)


# -- packing


def _pack(codes: Array, bits: int) -> Array:
    c = codes.astype(np.uint8)
    if bits == 4:
        return _joined(c, 2, 15, 4)
    return np.concatenate((_joined(c & 3, 4, 3, 2), _joined(c >> 2, 8, 1, 1)), 1)


def _joined(c: Array, parts: int, mask: int, shift: int) -> Array:
    cut = c.reshape(len(c), parts, -1) & mask
    out = cut[:, 0]
    for k in range(1, parts):
        out = out | cut[:, k] << k * shift
    return out


def _unpack(packed: Array, bits: int) -> Array:
    if bits == 4:
        return _parted(packed, 2, 15, 4).astype(F)
    quarter = packed.shape[1] // 3 * 2
    low, high = _parted(packed[:, :quarter], 4, 3, 2), _parted(packed[:, quarter:], 8, 1, 1)
    codes: Array = low | high << 2
    return codes.astype(F)


def _parted(packed: Array, parts: int, mask: int, shift: int) -> Array:
    return np.concatenate([packed >> k * shift & mask for k in range(parts)], 1)


# -- a scale for each channel


def _groups(tokens: int, group: int) -> list[range]:
    return [range(first, min(first + group, tokens)) for first in range(0, tokens, group)]


def _channels(x: Array, group: int, bits: int) -> list[Array]:
    scales, codes = list[Array](), list[Array]()
    for part in _groups(len(x), group):
        rows = x[part.start : part.stop]
        if bits == 8:
            scale = _half(np.abs(rows).max(0) * F(1 / 127))
            scales.append(scale)
            codes.append(_round(rows * _inverse(scale), -127, 127).astype(np.int8))
            continue
        low = rows.min(0)
        pair = _half(np.stack(((rows.max(0) - low) * F(1 / 15), low)))
        scales.append(pair)
        code = _round((rows - pair[1].astype(F)) * _inverse(pair[0]), 0, 15).astype(np.uint8)
        both = code[: (len(part) + 1) // 2].copy()
        both[: len(part) // 2] |= code[len(both) :] << 4
        codes.append(both)
    return scales + codes


def _from_channels(raw: Array, tokens: int, channels: int, group: int, bits: int) -> Array:
    parts, wide = _groups(tokens, group), 2 if bits == 8 else 4
    at, out = wide * channels * len(parts), np.empty((tokens, channels), F)
    for number, part in enumerate(parts):
        scales = raw[wide * channels * number : wide * channels * (number + 1)].view("<f2")
        lines = len(part) if bits == 8 else (len(part) + 1) // 2
        codes = raw[at : at + lines * channels].reshape(lines, channels)
        at += codes.size
        rows = out[part.start : part.stop]
        if bits == 8:
            rows[:] = codes.view(np.int8).astype(F) * scales.astype(F)
            continue
        rows[:lines] = codes & 15
        rows[lines:] = codes[: len(part) - lines] >> 4
        rows *= scales[:channels].astype(F)
        rows += scales[channels:].astype(F)
    return out


# -- levels of a normal distribution


@cache
def _levels(bits: int) -> Array:
    half = np.array(LEVELS[bits], F)
    return np.concatenate((-half[::-1], half))


def _length(x: Array) -> Array:
    lanes, squares = np.zeros((len(x), 8), F), (x * x).reshape(len(x), -1, 8)
    for k in range(squares.shape[1]):
        lanes = lanes + squares[:, k]
    total = np.zeros(len(x), F)
    for k in range(8):
        total = total + lanes[:, k]
    root: Array = np.sqrt(total)
    return root


def _normal(y: Array, bits: int) -> list[Array]:
    levels, half = _levels(bits), 1 << (bits - 1)
    between = (levels[half:-1] + levels[half + 1 :]) * F(0.5)
    length = _length(y)
    times = np.where(length > 0, np.sqrt(F(y.shape[1])) / length, F(0))
    values = y * times[:, None]
    above = (np.abs(values)[:, :, None] > between).sum(2)
    codes = np.where(values < 0, half - 1 - above, half + above)
    return [_half(length / _length(levels[codes])), _pack(codes, bits)]


# -- 8-bit floats


def _fp8(x: Array, mantissa: int) -> list[Array]:
    bias, top, most = (7, 448, 0x7E) if mantissa == 3 else (15, 57344, 0x7B)
    scale = np.abs(x).max((0, 2)) * F(1 / F(top))
    y = x * np.where(scale >= F(2**-126), F(1) / scale, F(0))[:, None]
    bits = y.view(np.uint32)
    size = bits & np.uint32(0x7FFFFFFF)
    small = np.rint(size.view(F) * F(2.0 ** (bias - 1 + mantissa)))
    shift = np.uint32(23 - mantissa)
    rounded = size + (size >> shift & 1) + np.uint32((1 << (22 - mantissa)) - 1)
    large = (rounded >> shift).astype(np.int64) - ((127 - bias) << mantissa)
    code = np.where(size < (128 - bias) << 23, np.minimum(small, 256), large).astype(np.int64)
    code = np.minimum(code, most).astype(np.uint8)
    return [scale.astype("<f4"), code | (bits >> 24 & 0x80).astype(np.uint8)]


@cache
def _fp8_values(mantissa: int) -> Array:
    bias, bits = (7, 15) if mantissa == 3 else (15, 31)
    code = np.arange(256)
    exponent, low = code >> mantissa & bits, code & ((1 << mantissa) - 1)
    size = np.where(
        exponent > 0,
        np.ldexp(F(1 << mantissa) + low, exponent - bias - mantissa),
        np.ldexp(low.astype(F), 1 - bias - mantissa),
    )
    return np.where(code & 0x80, -size, size).astype(F)
