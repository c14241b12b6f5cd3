"""The ladder against the best of {as it is, each level alone, computing} known in hindsight, in virtual time."""

from __future__ import annotations

import random
from functools import cache

import pytest

from lmcache_core import frame
from lmcache_core.spi import Refusal
from lmcache_core.testing.contexts import simulated_context
from lmcache_core.testing.fakes import Paced
from lmcache_core.testing.simulation import run_simulated
from lmcache_core.testing.worlds import make_manager, make_memory, make_tier
from lmcache_core.wrappers import Chain, Encoded, Ladder, LadderOptions
from tests.wrappers.serdes import High, Squeeze
from tests.wrappers.test_ladder import KEYS, PLAIN, bell_frame

CHUNKS = KEYS[:16]
LEVELS = (Chain(serdes=()), Chain(serdes=(High(),)), Chain(serdes=(High(), Squeeze())))
whole = cache(bell_frame)


def request(rate, computing, levels, *, cold=False):
    """Seconds to the first token.

    Args:
        rate: bytes per second, given the seconds since the request began.
        computing: seconds for one chunk.
        levels: one chain for each way to fetch a value.
        cold: nothing was measured before.
    """
    context = simulated_context(tier="far", latency_s=0.0, random=random.Random(1))
    link = Paced(context, make_memory(context), lambda time: 1e12)
    chain = levels[0] if len(levels) == 1 else None
    coded = (
        Encoded(chain, context, link)
        if chain
        else Ladder(LadderOptions(levels=levels), context, link)
    )
    tier = make_tier("far", coded, context=context, deadline=1e6, size=1 << 30)

    async def main():
        manager = make_manager([tier], capacity=200 * PLAIN, cost_gate=chain is None)
        await manager.open()
        for key in CHUNKS:
            (grant,) = manager.reserve([(key, PLAIN)], "me")
            assert not isinstance(grant, Refusal)
            grant.view[:] = whole(key)
            manager.commit(grant, frame.open_header(grant.view).identity)
            await manager.flush()
        manager.report_prefill(256, computing)
        clock = manager.context.clock
        for lap in range(1 if cold else 2):
            manager.pool.drop(CHUNKS)
            begun = clock.now()
            moves = 1.0 if lap or cold else 0.0  # the request before found a steady link
            link.rate = lambda time, begun=begun, moves=moves: rate(moves * (time - begun))
            loaded = await manager.load(CHUNKS, "me")
            took = clock.now() - begun + computing * (len(CHUNKS) - len(loaded.leases))
            manager.release(loaded.leases)
        manager.check()
        await manager.aclose()
        return took

    return run_simulated(main())


def against_the_best(rate, computing, *, cold=False):
    """The ladder's time as a multiple of the best way's that cannot change its mind."""
    ways = [request(rate, computing, (chain,)) for chain in LEVELS]
    best = min(*ways, computing * len(CHUNKS))
    return request(rate, computing, LEVELS, cold=cold) / best


@pytest.mark.parametrize("computing", [0.01, 0.1])
@pytest.mark.parametrize("rate", [0.5e6, 2e6, 20e6])
def test_no_way_is_much_quicker_in_hindsight(rate, computing):
    """Computing is best on the first link or two, the smallest form on the others."""
    assert against_the_best(lambda time: rate, computing) <= 1.1


@pytest.mark.parametrize(
    ("rate", "most"),
    [
        (lambda time: 20e6 if time < 0.03 else 1e6, 1.1),
        (lambda time: 1e6 if time < 0.1 else 20e6, 1.1),
        (lambda time: 20e6 if time < 0.03 else 1e3, 1.5),  # waiting for what does not come
    ],
)
def test_a_link_that_changes_under_way(rate, most):
    assert against_the_best(rate, 0.05) <= most


def test_the_first_request_costs_no_more_than_waiting_and_computing():
    assert against_the_best(lambda time: 1e4, 0.05, cold=True) <= 2.05
    # The index of such small values is half as long as their smallest form.
    assert against_the_best(lambda time: 20e6, 0.05, cold=True) <= 1.6
