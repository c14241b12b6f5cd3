"""Few distributions for many channels: each channel is coded with the one that costs it least."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmcache_serde_cachegen.tables import BITS

Array = NDArray[Any]
CLASSES = 48
"""Distributions of one level; more gain less than a hundredth of a bit."""
ROUNDS = 5
RARE = 2.0**-11
"""Share of symbols at either end that become escapes."""
ESCAPED = 16.0
"""Bits of an escape beside its symbol."""


def shared(histograms: Array, /) -> tuple[Array, Array, Array]:
    """Distributions after Lloyd's algorithm with code length as distance.

    Args:
        histograms: [channel][256] counts of symbols; the last one counts what lies outside +-127.

    Returns:
        The class of each channel, frequencies u2 [class][256], and the bits per symbol of each channel.
    """
    counts = histograms.astype(np.float32)
    total = np.maximum(counts.sum(1), 1)
    share = counts / total[:, None]
    entropy = -(share * np.log2(np.maximum(share, 1e-9))).sum(1)
    order = np.argsort(entropy, kind="stable")
    number = min(CLASSES, len(counts))
    classes = np.empty(len(counts), np.intp)
    edges = np.linspace(entropy[order[0]], entropy[order[-1]] + 1e-6, number + 1)
    classes[:] = np.clip(np.searchsorted(edges, entropy, "right") - 1, 0, number - 1)
    freqs = lengths = np.empty(0)
    for _ in range(ROUNDS):
        freqs = np.stack([frequencies(counts[classes == each].sum(0)) for each in range(number)])
        costs = share @ _lengths(freqs).T
        classes, lengths = costs.argmin(1), costs.min(1)
    return classes.astype(np.uint8), freqs.astype("<u2"), lengths


def frequencies(counts: Array, /) -> Array:
    """How often each symbol is to come in ``1 << BITS``: all within a limit, and the escape, at least once."""
    goal = 1 << BITS
    within, size = counts[:255].astype(np.float64) + 1e-3, np.abs(np.arange(255) - 127)
    total = within.sum() + counts[255]
    tails = within.sum() - np.cumsum(np.bincount(size, within))
    tails[127] = 0
    limit = max(1, int(np.argmax(tails <= RARE * total)))
    allowed = np.zeros(256, bool)
    allowed[:255], allowed[255] = size <= limit, True
    wanted = np.zeros(256)
    wanted[:255], wanted[255] = within, counts[255] + tails[limit]
    exact = np.where(allowed, wanted, 0) / total * goal
    found = np.where(allowed, np.maximum(1, np.floor(exact)), 0).astype(np.int64)
    while (
        excess := int(found.sum()) - goal
    ) > 0:  # what rare symbols got is taken from the commonest
        largest = int(found.argmax())
        found[largest] -= min(excess, found[largest] // 8 + 1)
    found[int(found.argmax())] -= min(0, excess)
    return found


def _lengths(freqs: Array) -> Array:
    """Bits of each symbol in each class; beyond the limit, those of an escape."""
    coded = BITS - np.log2(np.maximum(freqs, 1))
    outside = coded[:, 255:] + ESCAPED
    lengths = np.where(freqs > 0, coded, outside)
    lengths[:, 255:] = outside
    return lengths.astype(np.float32)
