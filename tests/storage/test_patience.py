"""Loads that are under way: given up for computing as soon as that is quicker."""

from __future__ import annotations

import pytest

from lmcache_core.storage import Reason
from lmcache_core.storage.gate import WINDOW, Patience
from lmcache_core.testing.contexts import simulated_context
from lmcache_core.testing.fakes import Paced
from lmcache_core.testing.simulation import run_simulated
from lmcache_core.testing.worlds import PAGE, key_of, make_manager, make_memory, make_tier, put

KEYS = [key_of(i) for i in range(40)]
VALUE = 2 * PAGE
"""Bytes of one, header included."""
COMPUTING = 0.01
"""Seconds for one chunk."""


def test_chunks_have_to_come_as_fast_as_they_could_be_computed():
    time = 5.0
    patience = Patience(lambda count: count * COMPUTING, 20, lambda: time)
    assert patience.limit == pytest.approx(5.0 + 20 * COMPUTING)
    assert patience.until() == pytest.approx(5.0 + COMPUTING)  # to look again
    for _ in range(WINDOW):
        time += 0.001
        patience.arrived()
    assert patience.limit == pytest.approx(5.0 + WINDOW * COMPUTING)
    time = 5.5
    assert patience.until() == patience.limit
    for _ in range(20 - WINDOW):
        patience.arrived()
    assert patience.until() == float("inf")
    assert Patience(lambda count: None, 3, lambda: time).until() == float("inf")


def request(rate, *, deadline=10.0):
    """Seconds to the first token, how many chunks came, and why no more: link and model as given."""
    context = simulated_context(tier="far")
    link = Paced(context, make_memory(context), lambda time: 1e12)
    tier = make_tier("far", link, context=context, deadline=deadline)

    async def main():
        manager = make_manager([tier], capacity=200 * VALUE)
        await manager.open()
        put(manager, KEYS)
        await manager.flush()
        manager.pool.drop(KEYS)
        manager.report_prefill(256, COMPUTING)
        clock = manager.context.clock
        begun = clock.now()
        link.rate = lambda time: rate(time - begun)
        loaded = await manager.load(KEYS, "me")
        took = clock.now() - begun + COMPUTING * (len(KEYS) - len(loaded.leases))
        manager.release(loaded.leases)
        manager.check()
        await manager.aclose()
        return took, len(loaded.leases), loaded.reason

    return run_simulated(main())


def test_a_quick_link_is_waited_for():
    took, count, reason = request(lambda time: 4 * VALUE / COMPUTING)
    assert (count, reason) == (40, Reason.COMPLETE)
    assert took == pytest.approx(40 * COMPUTING / 4, rel=0.05)


def test_a_link_that_slows_down_half_way_costs_little_more_than_computing_the_rest():
    took, count, reason = request(lambda time: (4 if time < 0.05 else 0.1) * VALUE / COMPUTING)
    assert (count, reason) == (20, Reason.GATE)
    best = 0.05 + 20 * COMPUTING
    assert took <= best + WINDOW * COMPUTING


def test_a_link_that_stops_is_not_waited_for_longer_than_computing_takes():
    took, count, reason = request(lambda time: 1e-3)
    assert (count, reason) == (0, Reason.GATE)
    assert took == pytest.approx(2 * 40 * COMPUTING, rel=0.01)


def test_the_deadline_of_the_tier_comes_first():
    _, count, reason = request(lambda time: 1e-3, deadline=0.1)
    assert (count, reason) == (0, Reason.DEADLINE)
