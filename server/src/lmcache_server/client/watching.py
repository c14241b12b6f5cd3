"""A bar for requests whose end is one answer: what is left is looked at meanwhile."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lmcache_core.cli.output import progress
from lmcache_core.spi import LMCacheError
from lmcache_server.client.operator import Operator

EVERY_S = 0.25


@contextmanager
def following(
    operator: Operator, label: str, left: Callable[[dict[str, Any]], int], /
) -> Iterator[None]:
    """Show how ``left`` of the daemon's document about itself falls, where standard error is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    total = left(operator.describe())
    ended = threading.Event()
    with progress(label, total) as advance:

        def watch() -> None:
            shown = 0
            with suppress(LMCacheError):  # the request itself says what is wrong
                while not ended.wait(EVERY_S):
                    done = max(shown, total - left(operator.describe()))
                    advance(done - shown)
                    shown = done
            ended.wait()
            advance(total - shown)

        thread = threading.Thread(target=watch, name="lmcache-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
