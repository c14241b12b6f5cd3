"""The cache's counters in vLLM's own log and at its own ``/metrics``."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from lmcache_engine_vllm.tally import HELP, NAMES


class Stats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not typed here
    """Counters of one interval; the numbers of several workers and steps add up."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: Any) -> Stats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {
            name.removeprefix("lmcache_").removesuffix("_total"): n for name, n in self.data.items()
        }

    def is_empty(self) -> bool:
        return not self.data


class Exported(KVConnectorPromMetrics):  # type: ignore[misc]
    """One counter per name and engine."""

    def __init__(
        self, config: Any, kinds: Any, labels: list[str], engines: dict[int, list[Any]]
    ) -> None:
        super().__init__(config, kinds, labels, engines)
        made = {
            name: kinds[Counter](name=name, documentation=HELP[name], labelnames=labels)
            for name in NAMES
        }
        self._counters = {
            (name, engine): counter.labels(*values)
            for name, counter in made.items()
            for engine, values in engines.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            counter = self._counters.get((name, engine_idx))
            if counter is not None:
                counter.inc(value)
