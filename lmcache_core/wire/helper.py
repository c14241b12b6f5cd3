"""What a client does besides its calls: one daemonic thread, and the ends of its process."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_core.wire.connection import Connections

TICK = 0.05
RETRY = (0.05, 1.0)
"""First and longest pause between two tries to connect, before jitter."""


def helper(reference: weakref.ref[Connections]) -> None:
    """Body of the thread: ends with its client."""
    pause = RETRY[0]
    while True:
        client = reference()
        if client is None or client.ended:
            return
        wake = client.wake
        wake.clear()
        pause = client.help(pause)
        connected = client.home is not None
        del client
        if connected:
            wake.wait(pause)
            time.sleep(
                TICK
            )  # what ends mostly goes out with the next request; this is for the rest
        else:
            time.sleep(pause)


def watch(client: Connections) -> None:
    """The child of a fork has neither mapping nor connections; at exit no thread may be in native code."""
    reference = weakref.ref(client)

    def forget() -> None:
        found = reference()
        if found is not None:
            found.abandon()

    def leave() -> None:
        found = reference()
        if found is not None:
            found.shut()

    os.register_at_fork(after_in_child=forget)
    atexit.register(leave)
    weakref.finalize(client, atexit.unregister, leave)
