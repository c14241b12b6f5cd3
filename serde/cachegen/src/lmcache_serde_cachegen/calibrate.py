"""Tables for one model from its keys and values on some text, and from how much its predictions mind errors there.

``klt``. The slope of the log likelihood of the following text, drawn from the model itself, gives the metric of a
small error: to second order the divergence of the predictions is half of its square, averaged (the Fisher
information). Errors here are not small, and texts few, so only a part of it is believed: ``TRUST`` between layers,
``1 - FLOOR`` between the directions of a head, the rest is error relative to what there is. In that metric the
coordinates of each head are principal ones, and one step for all coordinates of all heads, layers, keys and
values is the best division of bits (reverse water filling). Keys are turned back by their positions first,
where that makes them more alike.

``cachegen``. Steps in deviations of a channel that grow with depth; a channel is coded as differences from its
group's first token where that takes fewer bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmcache_serde_cachegen.classes import shared
from lmcache_serde_cachegen.tables import written

Array = NDArray[Any]
BITS = (4.4, 3.25, 2.8, 2.36, 1.9)
"""Bits per coordinate that the levels of ``klt`` aim at on the calibration text; other text takes a tenth more."""
STEPS = (0.15, 0.25, 0.35, 0.5, 0.75)
"""Steps of the levels of ``cachegen``, in deviations of a channel, before ``DEPTH``."""
DEPTH = (1.0, 1.5, 2.0)
"""How much coarser each third of the layers is."""
GROUP = 10
ROUNDING = 0.5
TRUST = 0.2
"""Exponent of the size of the slopes against that of the values, between layers."""
FLOOR = 0.8
"""Share of the metric of a head that is the same in all directions."""
KEYS = 0.5
"""Weight of keys against values: the softmax forgives keys more than their slopes say."""
LOUD = 0.8
"""Slopes beyond this quantile of their lengths are shortened to it: few tokens would rule otherwise."""
SKIPPED = 8
"""First tokens of a text, unlike all others, and exact anyway."""
SOME = 7
"""Of so many coordinates one is asked when a step is looked for."""
FINE = 1024
"""Finest steps on either side of the mean that are counted."""


def tables(
    samples: Sequence[tuple[Array, Array]], rope: Sequence[Array], /, *, model: str,
    about: Mapping[str, Any] | None = None,
) -> bytes:  # fmt: skip
    """A file of tables for both codecs.

    Args:
        samples: keys and values of texts from their beginning, and slopes of the log likelihood of what follows;
            float32 ``[layer][plane][token][head][dim]``, two planes.
        rope: angles per position of rotary embeddings that the model may use.
        about: what else to note.

    Raises:
        ValueError: heads whose length is no multiple of 16.
    """
    layers, planes, _, heads, dim = samples[0][0].shape
    if dim % 16 or planes != 2:
        raise ValueError(
            f"heads of {dim} elements in {planes} planes: they must be multiples of 16 in two"
        )
    turning, interleaved = _turning(samples[0][0], rope)
    pairs = [
        tuple(_straight(each, rope, turning, interleaved) for each in sample) for sample in samples
    ]
    values = np.concatenate([value[:, :, SKIPPED:] for value, _ in pairs], 2)
    slopes = np.concatenate([slope[:, :, SKIPPED:] for _, slope in pairs], 2)
    arrays: dict[str, Array] = {
        f"rope.{number}": np.asarray(each, "<f8") for number, each in enumerate(rope)
    }
    codecs = {"klt": _klt(values, slopes, arrays)}
    del pairs, values, slopes
    codecs["cachegen"] = _cachegen([value for value, _ in samples], arrays)
    described = {
        "model": model, "layers": [*range(layers)], "planes": planes, "heads": heads, "dim": dim,
        "rope": {"layers": turning, "interleaved": interleaved}, "codecs": codecs,
        "tokens": sum(value.shape[2] for value, _ in samples), **(about or {}),
    }  # fmt: skip
    return written(described, arrays)


def turned(rows: Array, frequencies: Array, interleaved: bool, direction: int) -> Array:
    """Keys ``[token][head][dim]`` turned by (or, with -1, back by) their positions."""
    angles = np.arange(len(rows))[:, None] * frequencies
    cosine, sine = np.cos(angles)[:, None], direction * np.sin(angles)[:, None]
    n, out = frequencies.size, rows.copy()
    first = np.s_[..., 0 : 2 * n : 2] if interleaved else np.s_[..., :n]
    other = np.s_[..., 1 : 2 * n : 2] if interleaved else np.s_[..., n : 2 * n]
    a, b = rows[first], rows[other]
    out[first], out[other] = a * cosine - b * sine, b * cosine + a * sine
    return out


def _turning(kv: Array, rope: Sequence[Array]) -> tuple[list[int], bool]:
    """Which embedding turns the keys of each layer (-1: none), told by what makes them more alike."""
    candidates = [
        (number, each, pair) for number, each in enumerate(rope) for pair in (False, True)
    ]

    def spread(rows: Array) -> float:
        each = rows[SKIPPED:].transpose(1, 2, 0)
        matrix = each @ each.transpose(0, 2, 1)
        matrix += 1e-6 * np.trace(matrix, axis1=1, axis2=2)[:, None, None] * np.eye(len(matrix[0]))
        return float(np.linalg.slogdet(matrix.astype(np.float64))[1].sum())

    plain = np.array([spread(layer[0]) for layer in kv])
    found = np.array([
        [spread(turned(layer[0], each, pair, -1)) for layer in kv] for _, each, pair in candidates
    ])  # fmt: skip
    if not candidates:
        return [-1] * len(kv), False
    gains = plain - found
    interleaved = bool(
        np.maximum(gains[1::2], 0).max(0).sum() > np.maximum(gains[::2], 0).max(0).sum()
    )
    chosen = gains[1::2] if interleaved else gains[::2]
    return [int(each.argmax()) if each.max() > 0 else -1 for each in chosen.T], interleaved


def _straight(kv: Array, rope: Sequence[Array], turning: Sequence[int], interleaved: bool) -> Array:
    out = kv.copy()
    for layer, number in enumerate(turning):
        if number >= 0:
            out[layer, 0] = turned(kv[layer, 0], rope[number], interleaved, -1)
    return out


def _klt(values: Array, slopes: Array, arrays: dict[str, Array]) -> dict[str, Any]:
    mean = values.mean(2)
    values -= mean[:, :, None]
    rows = values.transpose(0, 1, 3, 2, 4)  # [layer][plane][head][token][dim]
    covariance = _moment(rows)
    lengths = np.sqrt((slopes**2).sum(-1, keepdims=True))
    loud = np.quantile(lengths, LOUD, axis=2, keepdims=True)
    slopes *= np.minimum(1, loud / np.maximum(lengths, 1e-30))
    metric = _moment(slopes.transpose(0, 1, 3, 2, 4))
    dim = metric.shape[-1]
    size, spread = (
        np.trace(each, axis1=-2, axis2=-1)[..., None, None] / dim for each in (metric, covariance)
    )
    size, spread = (np.maximum(each, 1e-9 * each.max() + 1e-30) for each in (size, spread))
    metric = (1 - FLOOR) * metric / size + FLOOR * np.eye(dim)
    weight = size.mean(2, keepdims=True) ** TRUST * spread.mean(2, keepdims=True) ** (TRUST - 1)
    metric *= weight / weight.max() * np.array([KEYS, 1 / KEYS])[:, None, None, None]
    weights, axes = np.linalg.eigh(metric)
    root = (axes * np.sqrt(weights)[..., None, :]) @ axes.swapaxes(-1, -2)
    inverse = (axes / np.sqrt(weights)[..., None, :]) @ axes.swapaxes(-1, -2)
    energy, principal = np.linalg.eigh(root @ covariance @ root)
    principal = principal[..., ::-1]
    _put(arrays, "forward", root @ principal)
    _put(arrays, "backward", principal.swapaxes(-1, -2) @ inverse)
    finest = _step(energy, BITS[0] + 3)
    counts = _counted(rows, (root @ principal).astype(np.float32), finest)
    steps, classes, freqs, bits = [], [], [], []
    shape, some = mean.shape, counts[::SOME]
    for target in BITS:
        low, high = 0.5, 512.0
        for _ in range(14):
            middle = (low * high) ** 0.5
            low, high = (
                (low, middle) if _entropy(_coarser(some, middle)) < target else (middle, high)
            )
        times = (low * high) ** 0.5
        found = shared(_coarser(counts, times))
        steps.append(np.full(shape, finest * times, "<f4"))
        classes.append(found[0].reshape(shape)[:, None])
        freqs.append(found[1])
        bits.append(round(float(found[2].mean()), 3))
    arrays["klt.mean"] = mean.astype("<f4")
    arrays["klt.steps"], arrays["klt.classes"] = np.stack(steps), np.stack(classes)
    arrays["klt.freqs"] = np.stack(freqs)
    return {"group": 1, "rounding": [ROUNDING] * len(BITS), "bits": bits}


def _put(arrays: dict[str, Array], side: str, matrices: Array) -> None:
    """In half precision, the largest element of each head beside it."""
    scale = np.abs(matrices).max((-2, -1))
    arrays[f"klt.{side}"] = (matrices / scale[..., None, None]).astype("<f2")
    arrays[f"klt.{side}_scale"] = scale.astype("<f4")


def _moment(rows: Array) -> Array:
    """Mean of the outer products of ``[...][token][dim]``."""
    found: Array = (rows.swapaxes(-1, -2) @ rows).astype(np.float64) / rows.shape[-2]
    return found


def _step(energy: Array, bits: float) -> float:
    """The step at which normally distributed coordinates take so many bits on average."""
    low, high = 1e-12, 1e12
    for _ in range(100):
        middle = (low * high) ** 0.5
        length = np.mean(0.5 * np.log2(1 + 15.4 * np.maximum(energy, 0) / middle**2))
        low, high = (middle, high) if length > bits else (low, middle)
    return low


def _counted(rows: Array, forward: Array, step: float) -> Array:
    """How often each coordinate lies in each of ``2 * FINE - 1`` fine steps around its mean."""
    layers, planes, heads, _, dim = rows.shape
    width = 2 * FINE - 1
    counts = np.empty((layers, planes, heads, dim, width), np.int32)
    offsets = np.arange(dim) * width + FINE - 1
    for at in np.ndindex(layers, planes, heads):
        fine = np.rint((rows[at] @ forward[at]) / np.float32(step))
        fine = np.clip(fine, 1 - FINE, FINE - 1).astype(np.intp) + offsets
        counts[at] = np.bincount(fine.ravel(), minlength=dim * width).reshape(dim, width)
    return counts.reshape(-1, width)


def _coarser(counts: Array, times: float) -> Array:
    """Histograms of symbols ``[channel][256]`` at so many fine steps per step."""
    fine = np.arange(1 - FINE, FINE) / times
    coarse = np.trunc(fine + np.copysign(ROUNDING, fine)).astype(np.intp)
    places = np.where(np.abs(coarse) > 127, 128, coarse) + 127
    out = np.zeros((len(counts), 256), np.int64)
    starts = np.flatnonzero(np.diff(places, prepend=-1))
    sums = np.add.reduceat(counts, starts, axis=1, dtype=np.int64)
    for at, place in enumerate(places[starts]):  # escapes come from both ends
        out[:, place] += sums[:, at]
    return out


def _entropy(histograms: Array) -> float:
    share = histograms / np.maximum(histograms.sum(1, keepdims=True), 1)
    return float(-(share * np.log2(np.maximum(share, 1e-9))).sum(1).mean())


def _cachegen(samples: Sequence[Array], arrays: dict[str, Array]) -> dict[str, Any]:
    tokens = min(sample.shape[2] for sample in samples) // GROUP * GROUP
    values = np.concatenate(
        [sample[:, :, SKIPPED : tokens - GROUP + SKIPPED] for sample in samples], 2
    )
    layers, planes, count, heads, dim = values.shape
    mean, deviation = values.mean(2), values.std(2)
    depth = np.array(DEPTH)[np.arange(layers) * len(DEPTH) // layers]
    shape = mean.shape
    steps, classes, freqs, deltas, bits = [], [], [], [], []
    anchor = np.arange(count) % GROUP == 0
    for scale in STEPS:
        # one step for all channels of a plane: those that vary most are to have most bits
        spread = np.sqrt((deviation**2).mean((2, 3), keepdims=True))
        step = np.broadcast_to(scale * depth[:, None, None, None] * spread, shape).astype("<f4")
        first, plain, differing = (
            np.empty((layers, planes * heads * dim, 256), np.int64) for _ in range(3)
        )
        for layer in range(layers):
            q = np.rint((values[layer] - mean[layer][:, None]) / step[layer][:, None]).astype(
                np.int32
            )
            q = q.transpose(1, 0, 2, 3).reshape(count, -1)
            first[layer], plain[layer] = _histogram(q[anchor]), _histogram(q[~anchor])
            differing[layer] = _histogram((q - np.repeat(q[anchor], GROUP, 0))[~anchor])
        pays = np.array([
            [_bits(b) < _bits(a) for a, b in zip(plain[layer], differing[layer], strict=True)]
            for layer in range(layers)
        ])  # fmt: skip
        others = np.where(pays[..., None], differing, plain)
        found = shared(np.concatenate((first, others), 1).reshape(-1, 256))
        steps.append(step)
        classes.append(found[0].reshape(layers, 2, *shape[1:]))
        freqs.append(found[1])
        deltas.append(np.where(pays, 255, 0).astype("u1").reshape(shape))
        lengths = found[2].reshape(layers, 2, -1).mean((0, 2))
        bits.append(round(float(lengths[0] / GROUP + lengths[1] * (1 - 1 / GROUP)), 3))
    arrays["cachegen.mean"] = mean.astype("<f4")
    arrays["cachegen.steps"], arrays["cachegen.classes"] = np.stack(steps), np.stack(classes)
    arrays["cachegen.freqs"], arrays["cachegen.deltas"] = np.stack(freqs), np.stack(deltas)
    paying = [round(float((each > 0).mean()), 3) for each in deltas]
    return {"group": GROUP, "rounding": [0.5] * len(STEPS), "bits": bits, "deltas": paying}


def _histogram(q: Array) -> Array:
    """Counts of symbols ``[channel][256]`` of integers ``[token][channel]``."""
    places = np.where(np.abs(q) > 127, 128, q) + 127 + np.arange(q.shape[1]) * 256
    return np.bincount(places.ravel(), minlength=q.shape[1] * 256).reshape(-1, 256)


def _bits(histogram: Array) -> float:
    seen = histogram[histogram > 0] / histogram.sum()
    return float(-(seen * np.log2(seen)).sum())
