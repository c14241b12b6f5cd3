"""What is counted, and who is told. Every metric is declared here once; exporters live in the server.

A counter that is declared with an identity takes part in one of ``IDENTITIES``, which tests check after
every run: what is asked for is what is answered, what came in is what left plus what is there.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from lmcache_core.spi import Event, Observer

EVENT_LIMIT = 10_000
"""Events waiting for slow observers; further ones are dropped and counted."""


class Kind(Enum):
    """How the values of a metric are combined."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One declared metric; ``identity`` names the identity it takes part in."""

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    help: str
    identity: str = ""


@dataclass(frozen=True, slots=True)
class Identity:
    """``sum(left) == sum(right)`` for each combination of the labels ``by``.

    A term is a metric name, or ``name{label=value}`` for a part of it.
    """

    name: str
    left: tuple[str, ...]
    right: tuple[str, ...]
    by: tuple[str, ...] = ()


SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)  # fmt: skip
"""Upper bounds of histogram buckets; the last, unbounded one is not listed."""

_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
_T = ("tier",)

METRICS: tuple[Metric, ...] = (
    # The engine's view: one lookup of one request.
    Metric("lmcache_lookups_total", _C, "requests", (), "lookups of requests"),
    Metric("lmcache_asked_tokens_total", _C, "tokens", (), "tokens looked up", "tokens"),
    Metric("lmcache_hit_tokens_total", _C, "tokens", (), "tokens offered from the cache", "tokens"),
    Metric("lmcache_missed_tokens_total", _C, "tokens", (), "tokens not offered", "tokens"),
    Metric("lmcache_loaded_tokens_total", _C, "tokens", (), "tokens copied into an engine"),
    Metric("lmcache_stored_tokens_total", _C, "tokens", (), "tokens taken from an engine"),
    Metric("lmcache_failed_load_tokens_total", _C, "tokens", (), "tokens offered and then not loaded"),
    Metric("lmcache_unkeyed_requests_total", _C, "requests", (), "requests with an input that has no key"),
    Metric("lmcache_canary_tokens_total", _C, "tokens", (), "tokens of hits that were computed and compared"),
    Metric("lmcache_canary_differing_tokens_total", _C, "tokens", (), "of them, tokens that differed"),
    Metric("lmcache_request_seconds", _H, "seconds", ("verb",), "time in the cache per request"),
    # A tier's view.
    Metric("lmcache_tier_asked_tokens_total", _C, "tokens", _T, "tokens looked up in a tier", "tier tokens"),
    Metric("lmcache_tier_hit_tokens_total", _C, "tokens", _T, "tokens found in a tier", "tier tokens"),
    Metric("lmcache_tier_missed_tokens_total", _C, "tokens", _T, "tokens not found in a tier", "tier tokens"),
    Metric("lmcache_tier_asked_chunks_total", _C, "chunks", _T, "chunks looked up in a tier", "tier chunks"),
    Metric("lmcache_tier_hit_chunks_total", _C, "chunks", _T, "chunks found in a tier", "tier chunks"),
    Metric("lmcache_tier_missed_chunks_total", _C, "chunks", _T, "chunks not found in a tier", "tier chunks"),
    Metric("lmcache_tier_loads_asked_total", _C, "chunks", _T, "loads asked of a tier", "tier loads"),
    Metric("lmcache_tier_loads_total", _C, "chunks", ("tier", "outcome"), "loads by outcome: filled, missed, failed", "tier loads"),
    Metric("lmcache_tier_stores_asked_total", _C, "chunks", _T, "stores asked of a tier", "tier stores"),
    Metric("lmcache_tier_stores_total", _C, "chunks", ("tier", "outcome"), "stores by outcome: stored, present, refused, failed", "tier stores"),
    Metric("lmcache_tier_refusals_total", _C, "chunks", ("tier", "reason"), "stores refused, by reason", "tier refusals"),
    Metric("lmcache_tier_failures_total", _C, "chunks", ("tier", "verb", "reason"), "items that failed, by error type"),
    Metric("lmcache_tier_read_bytes_total", _C, "bytes", _T, "bytes loaded, as stored"),
    Metric("lmcache_tier_written_bytes_total", _C, "bytes", _T, "bytes stored, as stored"),
    Metric("lmcache_tier_in_bytes_total", _C, "bytes", ("tier", "how"), "bytes charged: stored, recovered at start", "tier bytes"),
    Metric("lmcache_tier_out_bytes_total", _C, "bytes", ("tier", "why"), "bytes released: evicted, deleted, expired, damaged, lost", "tier bytes"),
    Metric("lmcache_tier_resident_bytes", _G, "bytes", _T, "bytes charged to a tier now", "tier bytes"),
    Metric("lmcache_tier_limit_bytes", _G, "bytes", _T, "configured limit of a tier"),
    Metric("lmcache_tier_chunks", _G, "chunks", _T, "chunks in a tier now"),
    Metric("lmcache_tier_evicted_chunks_total", _C, "chunks", _T, "chunks that left for want of room"),
    Metric("lmcache_tier_damaged_total", _C, "chunks", ("tier", "reason"), "values that failed verification"),
    Metric("lmcache_tier_scrubbed_chunks_total", _C, "chunks", _T, "values read in the background and found whole"),
    Metric("lmcache_tier_scrubbed_bytes_total", _C, "bytes", _T, "their bytes"),
    Metric("lmcache_tier_scrub_rounds_total", _C, "rounds", _T, "times that every value was looked at"),
    Metric("lmcache_tier_verb_seconds", _H, "seconds", ("tier", "verb"), "duration of one call on a batch"),
    Metric("lmcache_tier_deadlines_total", _C, "calls", ("tier", "verb"), "calls nobody waited for any longer"),
    Metric("lmcache_tier_retries_total", _C, "calls", ("tier", "verb"), "calls tried again"),
    Metric("lmcache_tier_serde_raw_bytes_total", _C, "bytes", ("tier", "verb", "chain"), "bytes of recoded values, decoded"),
    Metric("lmcache_tier_serde_stored_bytes_total", _C, "bytes", ("tier", "verb", "chain"), "bytes of recoded values, as stored"),
    Metric("lmcache_tier_serde_seconds_total", _C, "seconds", ("tier", "verb", "chain"), "thread time of recoding"),
    Metric("lmcache_tier_serdes_off_total", _C, "times", ("tier", "serde"), "serdes left out for a failed self-test"),
    Metric("lmcache_tier_breaker", _G, "state", _T, "0 closed, 1 half open, 2 open"),
    Metric("lmcache_tier_breaker_opened_total", _C, "times", _T, "times a breaker opened"),
    Metric("lmcache_tier_gate_skips_total", _C, "chunks", ("tier", "verb"), "chunks the cost gate left out"),
    Metric("lmcache_tier_coalesced_total", _C, "chunks", _T, "loads answered by an equal one in flight"),
    Metric("lmcache_tier_promoted_chunks_total", _C, "chunks", _T, "chunks copied up from a tier"),
    Metric("lmcache_tier_prefetched_chunks_total", _C, "chunks", _T, "chunks brought up before they were loaded"),
    Metric("lmcache_tier_write_back_skipped_total", _C, "chunks", ("tier", "reason"), "chunks not queued for write-back"),
    Metric("lmcache_tier_quarantined_bytes", _G, "bytes", _T, "memory a call may still touch"),
    # Resident memory.
    Metric("lmcache_memory_bytes", _G, "bytes", ("tier", "state"), "memory by state: free, clean, dirty, reserved, quarantined", "memory"),
    Metric("lmcache_memory_capacity_bytes", _G, "bytes", _T, "memory of a tier", "memory"),
    Metric("lmcache_memory_leased_bytes", _G, "bytes", _T, "memory that somebody reads in place"),
    Metric("lmcache_memory_pinned_bytes", _G, "bytes", _T, "memory that an operator keeps from eviction"),
    # Key spaces, by the first digits of their digests: in a daemon, where several engines meet.
    Metric("lmcache_space_chunks", _G, "chunks", ("tier", "space"), "chunks of a key space"),
    Metric("lmcache_space_bytes", _G, "bytes", ("tier", "space"), "bytes of the chunks of a key space"),
    # The observers' own.
    Metric("lmcache_events_dropped_total", _C, "events", (), "events lost because observers were slow"),
    Metric("lmcache_observers_disabled_total", _C, "observers", (), "observers switched off because they raised"),
)  # fmt: skip  # one line per metric reads as a table

IDENTITIES: tuple[Identity, ...] = (
    Identity("tokens", ("lmcache_hit_tokens_total", "lmcache_missed_tokens_total"), ("lmcache_asked_tokens_total",)),
    Identity("tier tokens", ("lmcache_tier_hit_tokens_total", "lmcache_tier_missed_tokens_total"), ("lmcache_tier_asked_tokens_total",), _T),
    Identity("tier chunks", ("lmcache_tier_hit_chunks_total", "lmcache_tier_missed_chunks_total"), ("lmcache_tier_asked_chunks_total",), _T),
    Identity("tier loads", ("lmcache_tier_loads_total",), ("lmcache_tier_loads_asked_total",), _T),
    Identity("tier stores", ("lmcache_tier_stores_total",), ("lmcache_tier_stores_asked_total",), _T),
    Identity("tier refusals", ("lmcache_tier_refusals_total",), ("lmcache_tier_stores_total{outcome=refused}",), _T),
    Identity("tier bytes", ("lmcache_tier_in_bytes_total",), ("lmcache_tier_out_bytes_total", "lmcache_tier_resident_bytes"), _T),
    Identity("memory", ("lmcache_memory_bytes",), ("lmcache_memory_capacity_bytes",), _T),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """One value. ``buckets`` (histograms only) counts observations per bound of ``SECONDS``, then the rest."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float
    buckets: tuple[int, ...] = ()


class Snapshot(tuple[Sample, ...]):
    """All values at one moment."""

    __slots__ = ()

    def total(self, name: str, /, **labels: str) -> float:
        """Sum of the samples of ``name`` that carry these labels; 0 when there are none."""
        return sum(sample.value for sample in self.matching(name, **labels))

    def matching(self, name: str, /, **labels: str) -> Iterator[Sample]:
        wanted = labels.items()
        return (s for s in self if s.name == name and wanted <= dict(s.labels).items())


class Metrics:
    """Values of the declared metrics in this process. Thread-safe.

    A name or label that is not declared is a mistake in the caller and raises ``KeyError``.
    """

    def __init__(self, declared: Sequence[Metric] = METRICS) -> None:
        self._declared = {metric.name: metric for metric in declared}
        assert len(self._declared) == len(declared), "a metric is declared twice"
        self._values: dict[tuple[str, ...], float] = {}
        self._buckets: dict[tuple[str, ...], list[int]] = {}
        self._lock = threading.Lock()

    def add(self, name: str, value: float = 1, /, **labels: str) -> None:
        """Count."""
        key = self._key(name, Kind.COUNTER, labels)
        with self._lock:
            self._values[key] = self._values.get(key, 0) + value

    def counters(self, names: Sequence[str], /, **labels: str) -> Callable[[Sequence[float]], None]:
        """``add`` to several counters that have these labels, prepared: for what every request counts."""
        keys = [self._key(name, Kind.COUNTER, labels) for name in names]

        def add(amounts: Sequence[float]) -> None:
            values = self._values
            with self._lock:
                for key, amount in zip(keys, amounts, strict=True):
                    values[key] = values.get(key, 0) + amount

        return add

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Note the present value of a gauge."""
        key = self._key(name, Kind.GAUGE, labels)
        with self._lock:
            self._values[key] = value

    def forget(self, name: str, /) -> None:
        """Drop what was noted of a gauge: of things that may be gone."""
        with self._lock:
            for key in [key for key in self._values if key[0] == name]:
                del self._values[key]

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """Note one duration."""
        key = self._key(name, Kind.HISTOGRAM, labels)
        with self._lock:
            self._values[key] = self._values.get(key, 0) + value
            buckets = self._buckets.setdefault(key, [0] * (len(SECONDS) + 1))
            buckets[bisect_left(SECONDS, value)] += 1

    def snapshot(self) -> Snapshot:
        with self._lock:
            values = dict(self._values)
            buckets = {key: tuple(counts) for key, counts in self._buckets.items()}
        return Snapshot(
            Sample(
                key[0],
                tuple(zip(self._declared[key[0]].labels, key[1:], strict=True)),
                value,
                buckets.get(key, ()),
            )
            for key, value in sorted(values.items())
        )

    def _key(self, name: str, kind: Kind, labels: dict[str, str]) -> tuple[str, ...]:
        metric = self._declared[name]
        if metric.kind is not kind:
            raise KeyError(f"{name} is a {metric.kind.value}, not a {kind.value}")
        if len(labels) != len(metric.labels):
            raise KeyError(f"{name} has the labels {metric.labels}, not {tuple(labels)}")
        return (name, *[labels[label] for label in metric.labels])


def check_identities(
    snapshot: Snapshot, identities: Sequence[Identity] = IDENTITIES, /
) -> list[str]:
    """Name every identity that does not hold, one line each; empty when all do."""
    broken = []
    for identity in identities:
        sides = (identity.left, identity.right)
        sums: dict[tuple[str, ...], list[dict[str, float]]] = {}
        for side, term in [(i, term) for i, terms in enumerate(sides) for term in terms]:
            name, _, part = term.rstrip("}").partition("{")
            for sample in snapshot.matching(name, **dict([part.split("=")] if part else [])):
                group = tuple(value for label, value in sample.labels if label in identity.by)
                found = sums.setdefault(group, [dict.fromkeys(terms, 0.0) for terms in sides])
                found[side][term] += sample.value
        for group, (left, right) in sorted(sums.items()):
            if sum(left.values()) != sum(right.values()):
                labels = dict(zip(identity.by, group, strict=True))
                broken.append(f"{identity.name} {labels or ''}: {left} is not {right}")
    return broken


class Emitter:
    """Hands events to observers on a thread of its own, one event and one observer at a time.

    Call it with an event: that is cheap and never raises. An observer that raises is disabled and logged
    once; the others are not affected.
    """

    def __init__(
        self,
        observers: Sequence[tuple[str, Observer]],
        metrics: Metrics,
        /,
        *,
        log: logging.Logger,
        threaded: bool = True,
    ) -> None:
        """Take named observers; with ``threaded`` false events wait for ``drain`` (simulations)."""
        self._observers = list(observers)
        self._metrics = metrics
        self._log = log
        self._events: deque[Event] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        if threaded and observers:
            # Daemonic: a hung observer must not keep the process.
            self._thread = threading.Thread(target=self._run, name="lmcache-observers", daemon=True)
            self._thread.start()

    def __call__(self, event: Event, /) -> None:
        if not self._observers:
            return
        with self._wake:
            if self._closed:
                return
            if len(self._events) >= EVENT_LIMIT:
                self._metrics.add("lmcache_events_dropped_total")
                return
            self._events.append(event)
            self._wake.notify()

    def drain(self) -> None:
        """Deliver what is waiting."""
        while self._events:
            event = self._events.popleft()
            for pair in list(self._observers):
                name, observer = pair
                try:
                    observer.observe(event)
                except Exception:  # noqa: BLE001  named boundary: the cache outlives any observer
                    self._observers.remove(pair)
                    self._metrics.add("lmcache_observers_disabled_total")
                    self._log.exception("observer %s raised and is disabled", name)

    def close(self, timeout: float = 1.0) -> None:
        """Deliver what is waiting, for at most ``timeout`` seconds, and stop."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is None:
            self.drain()
        else:
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._events or self._closed)
                if not self._events:
                    return
            self.drain()
