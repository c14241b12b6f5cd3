"""Calibrated coordinates in numpy: their specification, and what runs where the native part is missing.

Rows are ``[token][head][dim]``; all arithmetic is IEEE single precision in the order written here, sums by
ascending index, so every implementation gives the same symbols. An element is turned back by its position,
its mean is taken off, the head's matrix gives coordinates, these are divided by their steps and rounded:
``trunc(v + copysign(rounding, v))``. With ``deltas`` a coordinate is the difference from that of the group's first
token, taken of the integers: an error there does not reach the others. Symbols are 127 + integer; beyond the
limit of a coordinate 255, and an i16 in the list of escapes, head by head, token by token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from typing_extensions import Buffer

Array = NDArray[Any]
F = np.float32
ESCAPE, MIDDLE, FURTHEST = 255, 127, 32767


class Basis:
    """Coordinates of one plane of one layer.

    Args:
        mean: float32 [heads][dim].
        forward: float32 [heads][element][coordinate]; empty: each element is one.
        backward: float32 [heads][coordinate][element]; empty likewise.
        dim: a multiple of 16.
    """

    def __init__(
        self, mean: Buffer, forward: Buffer, backward: Buffer, heads: int, dim: int
    ) -> None:
        if dim % 16:
            raise ValueError(f"no basis of {heads} heads of {dim} elements")
        self.heads, self.dim = heads, dim
        self.mean = _array(mean, F).reshape(heads, dim).copy()
        self.forward, self.backward = (
            _array(each, F).reshape(heads, dim, dim).copy() if memoryview(each).nbytes else None
            for each in (forward, backward)
        )


@np.errstate(all="ignore")
def basis_encode(
    basis: Basis, source: Buffer, symbols: Buffer, offset: int, stride: int, escapes: Buffer,
    steps: Buffer, limits: Buffer, deltas: Buffer, group: int, rounding: float, turns: Buffer,
    interleaved: bool, element: int, tokens: int,
) -> int:  # fmt: skip
    """Write the symbols of each token at ``offset + token * stride``; return the bytes of the escapes.

    Args:
        steps, limits, deltas: float32, uint8, uint8 for each channel; no deltas: none.
        turns: float32 [token][cosines, sines][pairs], or empty.
        element: 0 bfloat16, 1 float16, 2 float32.

    Returns:
        -1: the escapes do not fit; -2: an element is not finite, or too far from the mean.
    """
    x = elements(source, element).reshape(tokens, basis.heads, basis.dim)
    x = _turned(x, turns, interleaved, F(-1)) - basis.mean
    if basis.forward is not None:
        x = _product(np.zeros_like(x), x, basis.forward)
    values = x * (F(1) / _array(steps, F).reshape(x.shape[1:]))
    if not (np.abs(values) <= FURTHEST).all():
        return -2
    q = np.trunc(values + np.copysign(F(rounding), values)).astype(np.int32)
    if memoryview(deltas).nbytes:
        q -= _anchors(q, deltas, group)
    beyond = np.abs(q) > _array(limits, np.uint8).reshape(q.shape[1:])
    out = _grid(symbols, offset, stride, tokens, q[0].size)
    out[:] = np.where(beyond, ESCAPE, q + MIDDLE).astype(np.uint8).reshape(tokens, -1)
    far = q.transpose(1, 0, 2)[beyond.transpose(1, 0, 2)]
    if (np.abs(far) > FURTHEST).any():
        return -2
    room = memoryview(escapes).cast("B")
    if 2 * far.size > room.nbytes:
        return -1
    room[: 2 * far.size] = far.astype("<i2").tobytes()
    return int(2 * far.size)


@np.errstate(all="ignore")
def basis_decode(
    basis: Basis, symbols: Buffer, offset: int, stride: int, escapes: Buffer, into: Buffer,
    steps: Buffer, limits: Buffer, deltas: Buffer, group: int, turns: Buffer, interleaved: bool,
    element: int, tokens: int,
) -> int:  # fmt: skip
    """The inverse; return how many bytes of ``escapes`` were taken, or -1: they are too few."""
    coded = _grid(symbols, offset, stride, tokens, basis.heads * basis.dim)
    q = coded.reshape(tokens, basis.heads, basis.dim).astype(np.int32) - MIDDLE
    beyond = (q == ESCAPE - MIDDLE).transpose(1, 0, 2)
    count = int(beyond.sum())
    if 2 * count > memoryview(escapes).nbytes:
        return -1
    q.transpose(1, 0, 2)[beyond] = _array(memoryview(escapes)[: 2 * count], "<i2")
    if memoryview(deltas).nbytes:
        q += _anchors(q, deltas, group)
    x = q.astype(F) * _array(steps, F).reshape(q.shape[1:])
    mean = np.broadcast_to(basis.mean, x.shape)
    y = mean + x if basis.backward is None else _product(mean.copy(), x, basis.backward)
    _store(_turned(y, turns, interleaved, F(1)).reshape(-1), element, memoryview(into).cast("B"))
    return 2 * count


def _array(data: Buffer, kind: Any) -> Array:
    found: Array = np.frombuffer(memoryview(data), kind)
    return found


def _product(y: Array, x: Array, matrix: Array) -> Array:
    """``y`` plus rows times a matrix for each head; every product is rounded, and every sum."""
    for i in range(x.shape[2]):
        y += x[:, :, i : i + 1] * matrix[:, i]
    return y


def _turned(x: Array, turns: Buffer, interleaved: bool, direction: Any) -> Array:
    given = _array(turns, F)
    if not given.size:
        return x
    cosine, sine = given.reshape(len(x), 2, 1, -1).transpose(1, 0, 2, 3)
    pairs, out = cosine.shape[2], x.copy()
    first = np.s_[..., 0 : 2 * pairs : 2] if interleaved else np.s_[..., :pairs]
    other = np.s_[..., 1 : 2 * pairs : 2] if interleaved else np.s_[..., pairs : 2 * pairs]
    a, b, s = x[first], x[other], direction * sine
    out[first] = a * cosine - b * s
    out[other] = b * cosine + a * s
    return out


def _anchors(q: Array, deltas: Buffer, group: int) -> Array:
    """What each token of a group is the difference from; zero where none is taken."""
    chosen = _array(deltas, np.uint8).reshape(q.shape[1:]) != 0
    first = np.arange(len(q)) // group * group
    later = (np.arange(len(q)) != first)[:, None, None]
    return np.where(later & chosen, q[first], 0)


def _grid(symbols: Buffer, offset: int, stride: int, tokens: int, channels: int) -> Array:
    flat = _array(symbols, np.uint8)[offset:]
    return np.lib.stride_tricks.as_strided(
        flat[: (tokens - 1) * stride + channels], (tokens, channels), (stride, 1)
    )


def elements(source: Buffer, element: int) -> Array:
    """As float32."""
    if element == 0:
        return (_array(source, "<u2").astype(np.uint32) << 16).view(F)
    return _array(source, "<f2" if element == 1 else "<f4").astype(F)


def _store(x: Array, element: int, into: memoryview) -> None:
    if element:
        into[:] = x.astype("<f2" if element == 1 else "<f4").tobytes()
        return
    bits = np.ascontiguousarray(x).view(np.uint32)
    into[:] = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()
