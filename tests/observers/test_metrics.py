"""Metrics: declared once, counted safely, tied together by identities."""

from __future__ import annotations

import threading
import time

import pytest

from lmcache_core.observers import (
    IDENTITIES,
    METRICS,
    SECONDS,
    Identity,
    Kind,
    Metric,
    Metrics,
    check_identities,
)


def test_counts_add_up_per_label() -> None:
    metrics = Metrics()
    metrics.add("lmcache_tier_hit_tokens_total", 256, tier="cpu")
    metrics.add("lmcache_tier_hit_tokens_total", 256, tier="cpu")
    metrics.add("lmcache_tier_hit_tokens_total", 10, tier="disk")
    snapshot = metrics.snapshot()
    assert snapshot.total("lmcache_tier_hit_tokens_total", tier="cpu") == 512
    assert snapshot.total("lmcache_tier_hit_tokens_total") == 522
    assert snapshot.total("lmcache_tier_missed_tokens_total") == 0


def test_gauge_keeps_the_last_value() -> None:
    metrics = Metrics()
    metrics.set("lmcache_tier_resident_bytes", 5, tier="cpu")
    metrics.set("lmcache_tier_resident_bytes", 3, tier="cpu")
    assert metrics.snapshot().total("lmcache_tier_resident_bytes") == 3


def test_histogram_counts_every_observation_in_one_bucket() -> None:
    metrics = Metrics()
    for seconds in (0.0001, 0.0002, 99.0):
        metrics.observe("lmcache_request_seconds", seconds, verb="load")
    (sample,) = metrics.snapshot().matching("lmcache_request_seconds")
    assert sum(sample.buckets) == 3
    assert sample.buckets[0] == 1
    assert sample.buckets[1] == 1
    assert sample.buckets[len(SECONDS)] == 1
    assert sample.value == pytest.approx(99.0003)


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("lmcache_tier_hit_tokens", {"tier": "cpu"}),
        ("lmcache_tier_hit_tokens_total", {}),
        ("lmcache_tier_hit_tokens_total", {"layer": "cpu"}),
        ("lmcache_tier_hit_tokens_total", {"tier": "cpu", "verb": "load"}),
        ("lmcache_tier_resident_bytes", {"tier": "cpu"}),
    ],
)
def test_undeclared_name_label_or_kind_is_a_mistake(name: str, labels: dict[str, str]) -> None:
    with pytest.raises(KeyError):
        Metrics().add(name, 1, **labels)


def test_no_count_is_lost_between_threads() -> None:
    metrics = Metrics()

    def count() -> None:
        for _ in range(2000):
            metrics.add("lmcache_lookups_total")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.snapshot().total("lmcache_lookups_total") == 8000


def test_every_name_says_project_and_kind() -> None:
    for metric in METRICS:
        assert metric.name.startswith("lmcache_")
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert metric.name.endswith("_seconds") == (metric.kind is Kind.HISTOGRAM)
        assert metric.help
        assert metric.unit


def test_declared_identities_and_the_metrics_in_them_agree() -> None:
    taking_part: dict[str, set[str]] = {}
    for metric in METRICS:
        if metric.identity:
            taking_part.setdefault(metric.identity, set()).add(metric.name)
    for identity in IDENTITIES:
        terms = {term.partition("{")[0] for term in (*identity.left, *identity.right)}
        assert taking_part[identity.name] <= terms
        assert terms <= {metric.name for metric in METRICS}
    assert taking_part.keys() == {identity.name for identity in IDENTITIES}


def test_identity_that_holds_is_not_named() -> None:
    metrics = Metrics()
    metrics.add("lmcache_tier_asked_tokens_total", 10, tier="cpu")
    metrics.add("lmcache_tier_hit_tokens_total", 4, tier="cpu")
    metrics.add("lmcache_tier_missed_tokens_total", 6, tier="cpu")
    assert check_identities(metrics.snapshot()) == []


def test_broken_identity_is_named_with_its_numbers() -> None:
    metrics = Metrics()
    for tier in ("cpu", "disk"):
        metrics.add("lmcache_tier_asked_tokens_total", 10, tier=tier)
        metrics.add("lmcache_tier_hit_tokens_total", 10 if tier == "cpu" else 9, tier=tier)
    (line,) = check_identities(metrics.snapshot())
    assert line.startswith("tier tokens {'tier': 'disk'}: ")
    assert "9" in line


def test_a_refusal_without_a_reason_is_found() -> None:
    metrics = Metrics()
    metrics.add("lmcache_tier_stores_asked_total", 2, tier="cpu")
    metrics.add("lmcache_tier_stores_total", tier="cpu", outcome="stored")
    metrics.add("lmcache_tier_stores_total", tier="cpu", outcome="refused")
    (line,) = check_identities(metrics.snapshot())
    assert line.startswith("tier refusals")
    metrics.add("lmcache_tier_refusals_total", tier="cpu", reason="full")
    assert check_identities(metrics.snapshot()) == []


def test_metrics_of_others_can_be_declared_and_checked_the_same_way() -> None:
    metrics = Metrics(
        [
            Metric("lmcache_a_total", Kind.COUNTER, "things", (), "a", "pair"),
            Metric("lmcache_b_total", Kind.COUNTER, "things", (), "b", "pair"),
        ]
    )
    metrics.add("lmcache_a_total")
    pair = [Identity("pair", ("lmcache_a_total",), ("lmcache_b_total",))]
    assert len(check_identities(metrics.snapshot(), pair)) == 1


def test_a_count_costs_a_few_microseconds_at_most() -> None:
    """Seen in LMCache#1212: metrics on the hot path were slow. CPU time, so that neighbours do not count."""
    metrics, laps = Metrics(), 20_000
    before = time.thread_time()
    for _ in range(laps):
        metrics.add("lmcache_tier_hit_tokens_total", 256, tier="cpu")
    assert (time.thread_time() - before) / laps < 10e-6
