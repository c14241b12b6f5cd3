"""How long the loop stays away from its sockets: every turn is timed, the long ones are counted.

A turn is everything between two looks at the sockets; while it lasts nobody is answered.
"""

from __future__ import annotations

import gc
import selectors
import sys
import time

LONG = 0.001
"""Seconds from which on a turn is long."""
_YOUNG, _OLD = (2000, 20), 1000
_SWITCH = 0.0005


class Turns(selectors.EpollSelector):
    """The loop's selector, with a clock.

    Attributes:
        slowest: seconds of the longest turn.
        long: turns that took longer than ``LONG``, waits for other processes on the CPU included.
        busy: those of them in which the loop itself computed for so long.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slowest = 0.0
        self.long = self.busy = 0
        self._woke = self._cpu = 0.0

    def begin(self) -> None:
        """Count from the next turn on: whatever came before, nobody waited for it."""
        self.slowest = self._woke = 0.0
        self.long = self.busy = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        spent = time.perf_counter() - self._woke
        if spent > LONG and self._woke:
            self.long += 1
            self.slowest = max(self.slowest, spent)
            self.busy += time.thread_time() - self._cpu > LONG
        try:
            return super().select(timeout)
        finally:
            self._cpu = time.thread_time()
            self._woke = time.perf_counter()


def steady() -> None:
    """Let neither the collector nor another thread hold up a turn, from the start of service on.

    What was loaded until now is never looked through again, what has become old almost never (short-lived cycles
    are all there are), and a thread of a tier gives the interpreter back sooner than after the usual 5 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_YOUNG, _OLD)
    sys.setswitchinterval(_SWITCH)
