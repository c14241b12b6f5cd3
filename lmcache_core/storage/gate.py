"""Whether asking a tier pays, from what it was measured to cost and what computing costs."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

DECAY = 0.98
"""Weight of the past per measured call: about the last fifty count."""
EXPLORE = 0.01
"""Share of requests that ask a tier which does not pay, so that a better day is noticed."""

WINDOW = 8
"""Arrivals over which a load that is under way is measured."""


class Rate:
    """Seconds of a call as ``fixed + per_byte * nbytes``: least squares over the recent past."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def note(self, nbytes: int, seconds: float, /) -> None:
        """One finished call."""
        self._weight = self._weight * DECAY + 1
        self._x = self._x * DECAY + nbytes
        self._y = self._y * DECAY + seconds
        self._xx = self._xx * DECAY + nbytes * nbytes
        self._xy = self._xy * DECAY + nbytes * seconds

    @property
    def line(self) -> tuple[float, float]:
        """Fixed seconds and seconds per byte, neither negative; zeros before the first call."""
        if not self._weight:
            return 0.0, 0.0
        x, y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - x * x
        # Calls of one size say nothing about the split; all of it is then blamed on the bytes.
        slope = (
            (self._xy / self._weight - x * y) / spread
            if spread > 1e-6 * x * x
            else y / x
            if x
            else 0.0
        )
        slope = min(max(slope, 0.0), y / x if x else 0.0)
        return max(y - slope * x, 0.0), slope

    def expect(self, nbytes: int, /) -> float:
        """Predicted seconds of one call, 0 while unknown."""
        fixed, slope = self.line
        return fixed + slope * nbytes


class Prefill:
    """How fast the engine computes, as it reports."""

    def __init__(self) -> None:
        self._rate = Rate()

    def note(self, tokens: int, seconds: float, /) -> None:
        if tokens > 0 and seconds > 0:
            self._rate.note(tokens, seconds)

    def seconds(self, tokens: int, /) -> float | None:
        """What computing so many tokens takes, None while the engine has not said."""
        return self._rate.expect(tokens) or None


class Gate:
    """The balance of one tier."""

    def __init__(self, prefill: Prefill, source: random.Random, /, *, enabled: bool = True) -> None:
        self.load = Rate()
        self.enabled = enabled
        self._prefill = prefill
        self._random = source
        self._asked = self._gain = self._spent = 0.0

    def note_lookup(self, hits: int, seconds: float, tokens: int, nbytes: int, /) -> None:
        """One lookup that somebody waited for: what it cost, and what its hits are worth.

        Args:
            tokens: behind the hits.
            nbytes: of the hits.
        """
        computing = self._prefill.seconds(tokens) if hits else 0.0
        if computing is None:
            return
        self._asked = self._asked * DECAY + 1
        self._gain = self._gain * DECAY + max(0.0, computing - self.load.expect(nbytes))
        self._spent = self._spent * DECAY + seconds

    def asks(self) -> bool:
        """Whether to look into this tier for the next request."""
        if not self.enabled or self._asked < 10 or self._gain >= self._spent:
            return True
        return self._random.random() < EXPLORE

    def pays(self, nbytes: int, tokens: int, /) -> bool:
        """Whether loading beats computing; unknown rates do, and one in a hundred others is tried."""
        if not self.enabled:
            return True
        computing = self._prefill.seconds(tokens)
        if computing is None or self.load.expect(nbytes) <= computing:
            return True
        return self._random.random() < EXPLORE

    def keeps(self, nbytes: int, tokens: int, /) -> bool:
        """Whether storing makes sense: nobody would load what is dearer than computing it."""
        computing = self._prefill.seconds(tokens) if self.enabled else None
        return computing is None or self.load.expect(nbytes) <= computing

    def patience(self, chunks: int, tokens: int, now: Callable[[], float], /) -> Patience:
        """For a load of so many chunks that begins now."""
        seconds = self._prefill.seconds if self.enabled else lambda tokens: None
        return Patience(lambda count: seconds(count * tokens), chunks, now)


class Patience:
    """How long a load under way is worth waiting for: chunks have to come as fast as they could be computed.

    Counted over the last ``WINDOW`` arrivals; before there are so many, all chunks may take what computing
    all of them takes. So a link that slows down half way costs little more than computing the rest at once.
    """

    def __init__(
        self,
        computing: Callable[[int], float | None],
        chunks: int,
        now: Callable[[], float],
        /,
    ) -> None:
        self._computing = computing
        self._left = chunks
        self._now = now
        self._times = deque([now()], WINDOW + 1)

    def arrived(self) -> None:
        """One more chunk is here."""
        self._left -= 1
        self._times.append(self._now())

    @property
    def limit(self) -> float:
        """When to stop waiting for the next chunk unless it has come."""
        rest = self._computing(self._left) if self._left else None
        if rest is None:
            return float("inf")
        stalled = self._times[-1] + rest
        if len(self._times) <= WINDOW:
            return stalled
        return min(stalled, self._times[0] + rest / self._left * WINDOW)

    def until(self) -> float:
        """When to ask again: arrivals move the limit both ways."""
        limit = self.limit
        if limit == float("inf"):
            return limit
        return min(limit, self._now() + (self._computing(1) or 0.0))
