"""Touching memory before it is used: the first touch of a page costs microseconds that no store should pay."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lmcache_core import ops

if TYPE_CHECKING:
    from lmcache_core.memory.arena import Segment

_SLICE = 8 << 20


class Toucher:
    """Touches segments from their start in the background, one thread for each.

    Args:
        back: puts real memory behind a range (segment, base, bytes); False: there is none.
        pin: called with each piece after it has been touched.

    Attributes:
        ahead: most bytes of a segment touched beyond those ever used; None: all of it, at once.
        threads: those that have ended too.
    """

    def __init__(
        self,
        back: Callable[[Segment, int, int], bool],
        pin: Callable[[memoryview], None] | None,
        log: logging.Logger,
    ) -> None:
        self.ahead: int | None = None
        self.threads: list[threading.Thread] = []
        self._back, self._pin, self._log = back, pin, log
        self._closed = threading.Event()
        self._wakers: list[threading.Event] = []
        weakref.finalize(self, _settle, self._closed, self._wakers, self.threads)

    def start(self, segment: Segment) -> None:
        """Begin with a segment."""
        self._wakers.append(segment.moved)
        name = f"lmcache-populate-{segment.number}"
        thread = threading.Thread(target=self._run, args=(segment,), name=name, daemon=True)
        thread.start()
        self.threads.append(thread)

    def stop(self) -> None:
        """Touch no more; does not wait."""
        _stop(self._closed, self._wakers)

    def _run(self, segment: Segment) -> None:
        for base in range(0, segment.nbytes, _SLICE):
            nbytes = min(_SLICE, segment.nbytes - base)
            try:
                while self.ahead is not None and not self._closed.is_set():
                    segment.moved.clear()  # before the look, so that no move is missed
                    if base < segment.used + self.ahead:
                        break
                    segment.moved.wait()
                if self._closed.is_set() or not self._back(segment, base, nbytes):
                    return
                with segment.data[base : base + nbytes] as piece:
                    ops.populate(piece)
                    if self._pin is not None:
                        self._pin(piece)
            except (OSError, ValueError) as error:  # ValueError: closed meanwhile
                if not self._closed.is_set():
                    self._log.warning("memory is not touched ahead any more: %s", error)
                return
            segment.backed = max(segment.backed, base + nbytes)


def _stop(closed: threading.Event, wakers: Sequence[threading.Event]) -> None:
    closed.set()
    for waker in wakers:
        waker.set()


def _settle(
    closed: threading.Event,
    wakers: Sequence[threading.Event],
    threads: Sequence[threading.Thread],
) -> None:
    """At exit no thread may be in native code, which could not come back from it; a slice takes milliseconds."""
    _stop(closed, wakers)
    for thread in threads:
        if thread is not threading.current_thread():  # the last reference may go there
            thread.join(1.0)
