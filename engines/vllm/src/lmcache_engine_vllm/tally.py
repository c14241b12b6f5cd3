"""What one half has counted since it was asked last."""

from __future__ import annotations

from lmcache_core.observers import METRICS, Metrics

NAMES = (
    "lmcache_lookups_total", "lmcache_asked_tokens_total", "lmcache_hit_tokens_total",
    "lmcache_missed_tokens_total", "lmcache_loaded_tokens_total", "lmcache_failed_load_tokens_total",
    "lmcache_stored_tokens_total", "lmcache_unkeyed_requests_total", "lmcache_canary_tokens_total",
    "lmcache_canary_differing_tokens_total",
)  # fmt: skip
"""Counters that vLLM's own exporter shows too."""
HELP = {metric.name: metric.help for metric in METRICS}


class Tally:
    """Counts for the cache's exporters and for vLLM's at once."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._new: dict[str, float] = {}

    def add(self, name: str, value: float = 1) -> None:
        """Count."""
        if value:
            self._metrics.add(name, value)
            self._new[name] = self._new.get(name, 0) + value

    def take(self) -> dict[str, float]:
        """What has been counted since the last call."""
        new, self._new = self._new, {}
        return new
