"""Random histories, and proof that they would notice."""

from __future__ import annotations

import gc
import os
import sys

import pytest

from lmcache_core.memory.pool import Pool
from lmcache_core.storage import upkeep
from lmcache_core.storage.holdings import Holdings
from lmcache_core.storage.loading import Loader
from lmcache_core.testing import worlds
from lmcache_core.testing.histories import run_history
from lmcache_core.wrappers import check

SEEDS = int(os.environ.get("LMCACHE_SEEDS", "40"))
"""The stage of histories in CI runs 200 of these among its 1,000, nights 4,000 among 20,000."""


@pytest.mark.parametrize("block", range(10))
def test_no_history_breaks_a_promise(block):
    """Seen in LMCache#4385."""
    for seed in range(block * SEEDS // 10, (block + 1) * SEEDS // 10):
        run_history(seed)


def test_one_seed_is_one_history():
    one, two = run_history(7), run_history(7)
    one.seconds = two.seconds = 0.0
    assert one == two


def noticed(seeds=60):
    """Whether some history fails."""
    for seed in range(seeds):
        try:
            run_history(seed)
        except Exception:  # noqa: BLE001  # whatever a mutant breaks
            return True
    return False


@pytest.fixture(autouse=True)
def _buried_quietly(monkeypatch):
    """A history that failed leaves coroutines without a loop; their end is of no interest."""
    yield
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    gc.collect()


def test_memory_handed_on_too_early_is_noticed(monkeypatch):
    monkeypatch.setattr(Pool, "quarantine", Pool.abort)
    assert noticed(300)


def test_unverified_bytes_are_noticed(monkeypatch):
    monkeypatch.setattr(check.frame, "verify", lambda header, payload: None)
    monkeypatch.setattr(worlds.frame, "verify", lambda header, payload: None)
    assert noticed()


def test_writing_before_the_victims_have_left_is_noticed(monkeypatch):
    def charge(self, key, need):
        self.coming[key] = need
        self.coming_nbytes += need
        return True

    monkeypatch.setattr(Holdings, "charge", charge)
    assert noticed()


def test_forgotten_memory_is_noticed(monkeypatch):
    monkeypatch.setattr(Pool, "abort", lambda self, reservation: None)
    assert noticed()


def test_a_forgotten_waiter_is_noticed(monkeypatch):
    monkeypatch.setattr(Loader, "_tell", lambda self, flight, reason: None)
    assert noticed()


def test_a_victim_that_is_not_deleted_is_noticed(monkeypatch):
    async def remove(tier, keys, deadline, /, *, etag=None):
        if tier.holdings is not None:
            tier.holdings.left(keys)
        return len(keys)

    monkeypatch.setattr(upkeep, "remove", remove)
    assert noticed()
