"""Tags of encoded values that an earlier process stored: their headers tell, nothing is decoded."""

from __future__ import annotations

import pytest

from lmcache_core import frame
from lmcache_core.testing.contexts import simulated_context
from lmcache_core.testing.fakes import Recording
from lmcache_core.testing.simulation import run_simulated
from lmcache_core.testing.worlds import (
    Lasting,
    frame_nbytes,
    key_of,
    make_manager,
    make_memory,
    make_tier,
    spec_of,
)
from lmcache_core.wrappers import Chain, Encoded, Ladder, LadderOptions
from tests.wrappers.serdes import Squeeze

KEYS = [key_of(i) for i in range(4)]
NBYTES = 64 << 10
SQUEEZE = Chain(serdes=(Squeeze(),))


@pytest.mark.parametrize("ladder", [False, True])
def test_a_tag_is_found_by_headers_alone(ladder):
    context = simulated_context(tier="far")
    calls = Recording(context, Lasting(context, make_memory(context), persistent=True))

    def tier():
        options = LadderOptions(levels=(Chain(serdes=()), SQUEEZE))
        coded = Ladder(options, context, calls) if ladder else Encoded(SQUEEZE, context, calls)
        return make_tier("far", coded, context=context)

    async def main():
        manager = make_manager([tier()], capacity=1 << 22)
        await manager.open()
        for number, key in enumerate(KEYS):
            tags = ["red"] if number < 2 else []
            (grant,) = manager.reserve([(key, frame_nbytes(NBYTES, tags))], "me", tags=tags)
            room = frame.header_nbytes(1, tags=tags)
            sealed = frame.seal_value(
                grant.view[:room], grant.view[room:], key, spec=spec_of(NBYTES, 1), tags=tags
            )
            manager.commit(grant, sealed.identity)
        await manager.flush()
        await manager.aclose()
        manager = make_manager([tier()], capacity=1 << 22)
        await manager.open()
        await manager.tiers[0].complete.wait()
        calls.calls.clear()
        assert await manager.invalidate("red") == 2
        reads = [call.nbytes for call in calls.calls if call.verb == "load"]
        assert set(reads) == {frame.ALIGNMENT}
        assert len((await manager.list("far")).values) == 2
        await manager.aclose()

    run_simulated(main())
