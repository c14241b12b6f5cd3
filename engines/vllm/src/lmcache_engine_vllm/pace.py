"""How long the engine takes to compute prompts, as its scheduler sees it: what lower tiers have to beat.

A step is measured from the moment its orders are complete until its output is taken up. That is never too short,
whatever runs in between: an accelerator's launches return at once, and under asynchronous scheduling the step before
may still be computed when this one is ordered. Too long a time only makes the cost gate lenient.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

RUN = 8
"""Steps measured as one while each is ordered before the one before it has ended."""
MOST = 64
"""Steps waiting for their output; no engine has so many under way, the rest are lost."""


class Pace:
    """Args:
    report: told tokens, and seconds.
    chunk: a request that computes fewer tokens in a step is not computing a prompt, or is at the end of one.
    overlap: several steps may be computed at the same time, so that only each alone tells how long it takes.
    """

    def __init__(
        self,
        report: Callable[[int, float], None],
        chunk: int,
        *,
        overlap: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._chunk = chunk
        self._longest = 1 if overlap else RUN
        self._now = now
        self._open: deque[tuple[float, int]] = deque()
        self._run: list[tuple[float, int]] = []
        self._heard = False

    def begin(self, sizes: Iterable[int], loads: bool) -> None:
        """A step is ordered that computes so many tokens of each request.

        Args:
            loads: it also fills blocks from the cache, and tells nothing.
        """
        tokens = 0 if loads else sum(size for size in sizes if size >= self._chunk)
        # Should outputs get lost, each ends a step that began before its own: again, never too short.
        if len(self._open) < MOST:
            self._open.append((self._now(), tokens))
        self._heard = False

    def heard(self) -> None:
        """The workers' report of the oldest step is there; ``end`` comes next."""
        self._heard = True

    def end(self) -> None:
        """The output of the oldest step is taken up, if its workers were heard of."""
        heard, self._heard = self._heard, False
        if not self._open:
            return
        step = self._open.popleft()
        if not (step[1] and heard):
            # Unheard: a scheduler that takes events while it orders has computed nothing yet.
            self._run.clear()
            return
        self._run.append(step)
        # The next one began, at the earliest, when this one ended: only together is their time known.
        if len(self._run) < self._longest and self._open and self._open[0][1]:
            return
        run, self._run = self._run, []
        self._report(sum(tokens for _, tokens in run), self._now() - run[0][0])
