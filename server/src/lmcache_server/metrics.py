"""A daemon's metrics in Prometheus' text form, under their own names and the ones users already chart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from lmcache_core.observers import METRICS, SECONDS, Kind, Metric, Sample, Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_DECLARED = {metric.name: metric for metric in METRICS}
_RENAMED = {"tier": "backend", "verb": "operation"}


@dataclass(frozen=True, slots=True)
class Alias:
    """A name that dashboards of LMCache know, for a metric of ours; labels are renamed alike."""

    name: str
    source: str


ALIASES = (
    Alias("lmcache_requests_total", "lmcache_tier_asked_chunks_total"),
    Alias("lmcache_hits_total", "lmcache_tier_hit_chunks_total"),
    Alias("lmcache_backend_size_bytes", "lmcache_tier_resident_bytes"),
    Alias("lmcache_evictions_total", "lmcache_tier_evicted_chunks_total"),
    Alias("lmcache_latency_seconds", "lmcache_tier_verb_seconds"),
)
HIT_RATE = "lmcache_hit_rate"


class Exported(Collector):
    """One snapshot as a collector."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._samples: dict[str, list[Sample]] = {}
        for sample in snapshot:
            self._samples.setdefault(sample.name, []).append(sample)

    def describe(self) -> Iterable[Family]:
        """Nothing: names are those of the declared registry, which is free of twins."""
        return ()

    def collect(self) -> Iterator[Family]:
        for metric in METRICS:
            yield from self._family(metric, metric.name, metric.help, metric.labels)
        for alias in ALIASES:
            metric = _DECLARED[alias.source]
            labels = tuple(_RENAMED[label] for label in metric.labels)
            yield from self._family(metric, alias.name, f"same as {metric.name}", labels)
        yield self._hit_rate()

    def _family(
        self, metric: Metric, name: str, text: str, labels: tuple[str, ...]
    ) -> Iterator[Family]:
        samples = self._samples.get(metric.name, ())
        if metric.kind is Kind.HISTOGRAM:
            histogram = HistogramMetricFamily(name, text, labels=labels)
            bounds = [*map(str, map(float, SECONDS)), "+Inf"]
            for sample in samples:
                buckets = list(zip(bounds, accumulate(sample.buckets), strict=True))
                histogram.add_metric(_values(sample), buckets, sample.value)
            yield histogram
        elif metric.kind is Kind.COUNTER:
            counter = CounterMetricFamily(name.removesuffix("_total"), text, labels=labels)
            for sample in samples:
                counter.add_metric(_values(sample), sample.value)
            yield counter
        else:
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for sample in samples:
                gauge.add_metric(_values(sample), sample.value)
            yield gauge

    def _hit_rate(self) -> Family:
        rate = GaugeMetricFamily(
            HIT_RATE, "chunks found per chunk looked up, since the start", labels=("backend",)
        )
        hits = {s.labels: s.value for s in self._samples.get("lmcache_tier_hit_chunks_total", ())}
        for sample in self._samples.get("lmcache_tier_asked_chunks_total", ()):
            if sample.value:
                rate.add_metric(_values(sample), hits.get(sample.labels, 0.0) / sample.value)
        return rate


def _values(sample: Sample) -> list[str]:
    return [value for _, value in sample.labels]


def exposition(snapshot: Snapshot, /) -> bytes:
    """What a scrape is answered with."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Exported(snapshot))
    return bytes(generate_latest(registry))
