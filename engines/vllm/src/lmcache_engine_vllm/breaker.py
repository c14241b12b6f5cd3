"""No call to a daemon that does not answer: each one would cost a step its deadline."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lmcache_core.storage.results import Reason
from lmcache_core.wire.client import DaemonClient
from lmcache_engine_vllm.settings import LOG

CALL = 0.1
"""Seconds a call may take on an engine's critical path."""
PAUSE = (1.0, 30.0)
"""First and longest pause after calls without an answer."""

DISTRUST = 3, 60.0
"""After so many steps with failed loads within so many seconds nothing is offered for as long."""


class Breaker:
    """Opens when a call found no answer in time, for longer each time."""

    def __init__(self) -> None:
        self._until = 0.0
        self._pause = PAUSE[0]

    @property
    def closed(self) -> bool:
        """Whether calls may be made."""
        return time.monotonic() >= self._until

    def deadline(self) -> float:
        """For the next call; monotonic time, as the client counts."""
        return time.monotonic() + CALL

    @contextmanager
    def watch(self, client: DaemonClient) -> Iterator[None]:
        """Judge the calls made inside."""
        client.trouble = Reason.COMPLETE
        try:
            yield
        finally:  # some calls raise what they miss
            if client.trouble is Reason.DEADLINE:
                pause = self._pause * random.uniform(0.7, 1.3)
                self._until = time.monotonic() + pause
                LOG.warning(
                    "the daemon gives no answer in time; it is left alone for %.1f s", pause
                )
                self._pause = min(PAUSE[1], self._pause * 2)
            elif client.trouble is Reason.COMPLETE:
                self._pause = PAUSE[0]


class Trust:
    """A cache whose loads keep failing is left alone: for a while, and at last for good."""

    def __init__(self) -> None:
        self._failures = self._strikes = 0
        self._failed = self._until = 0.0

    @property
    def given(self) -> bool:
        """Whether something may be offered."""
        return time.monotonic() >= self._until

    def judge(self, loads_failed: bool) -> None:
        """After a step."""
        if not loads_failed:
            return
        now, (most, seconds) = time.monotonic(), DISTRUST
        self._failures = self._failures + 1 if now < self._failed + seconds else 1
        self._failed = now
        if self._failures >= most:
            self._failures = 0
            self._strikes += 1
            self._until = now + seconds if self._strikes < most else float("inf")
            what = f"for {seconds:.0f} seconds" if self._strikes < most else "any more"
            LOG.warning("loads keep failing; nothing is offered %s", what)
