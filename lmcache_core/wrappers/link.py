"""Which form of what is still to be fetched arrives in time, from what was measured."""

from __future__ import annotations

import os
from collections.abc import Sequence

KEEP = 0.8
"""Weight of the past per arrival: about the last five count."""
SLACK = 1.05
"""A finer form is taken where it costs so little more time than the quickest."""


class Link:
    """How fast bytes have arrived lately, and what decoding costs.

    Args:
        lanes: values that are decoded at once.
    """

    def __init__(self, lanes: int, /) -> None:
        self._lanes = max(1, min(lanes, len(os.sched_getaffinity(0))))
        self._nbytes = self._seconds = 0.0
        self._last = float("-inf")
        self._costs: dict[int, float] = {}

    @property
    def per_byte(self) -> float | None:
        """Seconds for each byte, None before the first arrival."""
        return self._seconds / self._nbytes if self._nbytes else None

    def arrived(self, nbytes: int, departed: float, now: float, /) -> None:
        """Bytes asked for at ``departed``, perhaps beside others, are here."""
        begun, self._last = max(departed, self._last), now
        self._nbytes = self._nbytes * KEEP + nbytes
        self._seconds = self._seconds * KEEP + now - begun

    def decoded(self, level: int, nbytes: int, seconds: float, /) -> None:
        """CPU time that so many plain bytes took."""
        cost, known = seconds / nbytes, self._costs.get(level)
        self._costs[level] = cost if known is None else KEEP * known + (1 - KEEP) * cost

    def choose(self, sizes: Sequence[int], flying: int, raw: int, limit: float, /) -> int:
        """The finest level that arrives within ``limit`` seconds, else the finest of the quickest.

        Before anything was measured the last one, and a level not decoded yet counts as free.

        Args:
            sizes: bytes of all that is to be fetched at each level, finest first.
            flying: bytes on their way already.
            raw: bytes of the same before encoding.
        """
        if self.per_byte is None:
            return len(sizes) - 1
        times = [
            max((flying + nbytes) * self.per_byte, raw * self._costs.get(level, 0.0) / self._lanes)
            for level, nbytes in enumerate(sizes)
        ]
        most = max(limit, SLACK * min(times))
        return next(level for level, seconds in enumerate(times) if seconds <= most)
