"""No call to a daemon that does not answer: each one would cost a step its deadline."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lmcache_core.storage.results import Reason
from lmcache_core.wire.client import DaemonClient

CALL = 0.1
"""Seconds a call may take on an engine's critical path."""
PAUSE = (1.0, 30.0)
"""First and longest pause after calls without an answer."""


class Breaker:
    """Opens when a call found no answer in time, for longer each time."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._until = 0.0
        self._pause = PAUSE[0]

    @property
    def closed(self) -> bool:
        """Whether calls may be made."""
        return self._now() >= self._until

    def deadline(self) -> float:
        """For the next call; monotonic time, as the client counts."""
        return time.monotonic() + CALL

    @contextmanager
    def watch(self, client: DaemonClient) -> Iterator[None]:
        """Judge the calls made inside."""
        client.trouble = Reason.COMPLETE
        yield
        if client.trouble is Reason.DEADLINE:
            self._until = self._now() + self._pause * random.uniform(0.7, 1.3)
            self._pause = min(PAUSE[1], self._pause * 2)
        elif client.trouble is Reason.COMPLETE:
            self._pause = PAUSE[0]
