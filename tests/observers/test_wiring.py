"""Observers, notes and the log level of a configuration reach the running cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest

from lmcache_core.config import load
from lmcache_core.engine.cache import Cache
from lmcache_core.registry import Offer, Registry
from lmcache_core.spi import Event, TierClosed, TierOpened

SEEN: list[tuple[str, Event]] = []


@dataclass(frozen=True)
class Options:
    label: str = "plain"


class Watch:
    config_type = Options

    def __init__(self, config: Options, /) -> None:
        self.label = config.label

    def observe(self, event: Event, /) -> None:
        SEEN.append((self.label, event))


def test_a_configured_observer_sees_tiers_open_and_close(caplog: pytest.LogCaptureFixture) -> None:
    SEEN.clear()
    registry = Registry(
        environment={}, find=lambda: (Offer("observers", "watch", f"{__name__}:Watch"),)
    )
    effective = load(
        env={},
        registry=registry,
        flags={
            "tiers": [{"memory": {"size": "64MiB"}}],
            "observers": [{"watch": {"label": "mine"}}],
            "log_level": "warning",
            "numa_mode": "auto",
        },
    )
    direct: list[Event] = []
    cache = Cache(effective, observe=direct.append)
    cache.close()
    kinds = {type(event) for label, event in SEEN if label == "mine"}
    assert {TierOpened, TierClosed} <= kinds
    assert [event for _, event in SEEN] == direct
    assert logging.getLogger("lmcache").level == logging.WARNING
    assert "numa_mode has no effect" in caplog.text
    logging.getLogger("lmcache").setLevel(logging.NOTSET)
