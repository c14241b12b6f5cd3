"""Our connector with a clock around every hook: seconds on the engine's critical path, per process.

The totals lie in ``$LMCACHE_BENCH_TIMES/scheduler`` and ``.../worker`` as (seconds, calls), written after each
call so that a measurement can read them from outside at any step.
"""

from __future__ import annotations

import functools
import os
import struct
import time
from collections.abc import Callable
from typing import Any

from lmcache_engine_vllm.connector import LMCacheConnector, LMCacheMPConnector

TOTAL = struct.Struct("dQ")


def timed(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Add the seconds of every call to the connector's total."""

    @functools.wraps(hook)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        begun = time.perf_counter()
        try:
            return hook(self, *arguments, **keywords)
        finally:
            self.seconds += time.perf_counter() - begun
            self.calls += 1
            os.pwrite(self.file, TOTAL.pack(self.seconds, self.calls), 0)

    return call


class TimedConnector(LMCacheMPConnector):
    """The connector for a daemon that others started, with a clock."""

    def __init__(self, config: Any, role: Any, kv_cache_config: Any) -> None:
        folder = os.environ["LMCACHE_BENCH_TIMES"]
        self.seconds, self.calls = 0.0, 0
        self.file = os.open(f"{folder}/{role.name.lower()}", os.O_RDWR | os.O_CREAT)
        super().__init__(config, role, kv_cache_config)


for name, value in vars(LMCacheConnector).items():
    if (
        callable(value)
        and not name.startswith("_")
        and name not in ("register_kv_caches", "shutdown")
    ):
        setattr(TimedConnector, name, timed(value))
