"""Observers watch; they can neither stop nor slow the cache."""

from __future__ import annotations

import logging
import threading

import pytest

from lmcache_core import observers
from lmcache_core.observers import Emitter, Metrics
from lmcache_core.spi import Event, Evicted, TierOpened

LOG = logging.getLogger("lmcache.test")
OPENED = TierOpened(tier="cpu", plugin="memory")


class Remembering:
    def __init__(self) -> None:
        self.seen: list[Event] = []

    def observe(self, event: Event, /) -> None:
        self.seen.append(event)


class Raising(Remembering):
    def observe(self, event: Event, /) -> None:
        super().observe(event)
        raise RuntimeError("observer fault")


def test_each_observer_sees_each_event_in_order() -> None:
    first, second = Remembering(), Remembering()
    emitter = Emitter([("a", first), ("b", second)], Metrics(), log=LOG, threaded=False)
    evicted = Evicted(tier="cpu", count=1, nbytes=10)
    emitter(OPENED)
    emitter(evicted)
    emitter.drain()
    assert first.seen == second.seen == [OPENED, evicted]


def test_an_observer_that_raises_is_disabled_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad, good, metrics = Raising(), Remembering(), Metrics()
    emitter = Emitter([("bad", bad), ("good", good)], metrics, log=LOG, threaded=False)
    for _ in range(3):
        emitter(OPENED)
    emitter.drain()
    assert len(bad.seen) == 1
    assert len(good.seen) == 3
    assert [record.getMessage() for record in caplog.records] == [
        "observer bad raised and is disabled"
    ]
    assert metrics.snapshot().total("lmcache_observers_disabled_total") == 1


def test_events_are_delivered_on_another_thread_before_close_returns() -> None:
    class Where(Remembering):
        def observe(self, event: Event, /) -> None:
            super().observe(event)
            self.thread = threading.current_thread()

    watching = Where()
    emitter = Emitter([("a", watching)], Metrics(), log=LOG)
    emitter(OPENED)
    emitter.close()
    assert watching.seen == [OPENED]
    assert watching.thread is not threading.current_thread()
    assert watching.thread.daemon


def test_nothing_is_delivered_after_close() -> None:
    watching = Remembering()
    emitter = Emitter([("a", watching)], Metrics(), log=LOG, threaded=False)
    emitter.close()
    emitter(OPENED)
    emitter.drain()
    assert watching.seen == []


def test_a_hung_observer_loses_events_but_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen in dynamo#3747."""
    monkeypatch.setattr(observers, "EVENT_LIMIT", 2)
    started, release = threading.Event(), threading.Event()

    class Hung(Remembering):
        def observe(self, event: Event, /) -> None:
            started.set()
            release.wait(10)
            super().observe(event)

    hung, metrics = Hung(), Metrics()
    emitter = Emitter([("hung", hung)], metrics, log=LOG)
    emitter(OPENED)
    assert started.wait(10)
    for _ in range(5):
        emitter(OPENED)
    assert metrics.snapshot().total("lmcache_events_dropped_total") == 3
    emitter.close(timeout=0)
    release.set()


def test_without_observers_there_is_no_thread() -> None:
    before = threading.active_count()
    emitter = Emitter([], Metrics(), log=LOG)
    emitter(OPENED)
    emitter.close()
    assert threading.active_count() == before
