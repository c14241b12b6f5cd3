"""Never slower than no cache: what is asked, what is loaded, what is stored."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_core.observers import check_identities
from lmcache_core.spi import Found
from lmcache_core.storage import Reason
from lmcache_core.storage.answers import Answers
from lmcache_core.storage.gate import Gate, Prefill, Rate
from lmcache_core.testing.contexts import simulated_context
from lmcache_core.testing.fakes import Recording, Slow
from lmcache_core.testing.simulation import run_simulated
from lmcache_core.testing.worlds import (
    Lasting,
    key_of,
    make_manager,
    make_memory,
    make_tier,
    put,
)

KEYS = [key_of(i) for i in range(6)]


@given(st.floats(0, 0.1), st.floats(1e-12, 1e-8), st.lists(st.integers(1, 1 << 30), min_size=20))
def test_fixed_cost_and_rate_are_found_from_calls_of_different_sizes(fixed, per_byte, sizes):
    rate = Rate()
    for nbytes in sizes:
        rate.note(nbytes, fixed + per_byte * nbytes)
    for nbytes in sizes:
        assert rate.expect(nbytes) == pytest.approx(fixed + per_byte * nbytes, rel=0.02, abs=1e-6)


def test_nothing_measured_and_nothing_reported_means_yes():
    gate = Gate(Prefill(), random.Random(0))
    assert gate.asks()
    assert gate.pays(1 << 30, 1)
    assert gate.keeps(1 << 30, 1)


def test_a_load_dearer_than_computing_is_skipped_but_tried_now_and_then():
    """Seen in Mooncake#467."""
    prefill = Prefill()
    prefill.note(1000, 1.0)
    gate = Gate(prefill, random.Random(0))
    gate.load.note(1 << 20, 2.0)
    assert gate.pays(1 << 18, 1000)
    tried = sum(gate.pays(1 << 20, 1000) for _ in range(10_000))
    assert 50 <= tried <= 150
    assert not gate.keeps(1 << 20, 1000)
    for _ in range(300):
        gate.load.note(1 << 20, 0.1)  # a better day
    assert all(gate.pays(1 << 20, 1000) for _ in range(100))


def test_a_tier_without_hits_is_asked_for_one_request_in_a_hundred():
    prefill = Prefill()
    prefill.note(1000, 1.0)
    gate = Gate(prefill, random.Random(0))
    for _ in range(20):
        gate.note_lookup(0, 0.01, 0, 0)
    asked = sum(gate.asks() for _ in range(10_000))
    assert 50 <= asked <= 150
    for _ in range(20):
        gate.note_lookup(5, 0.01, 5000, 1 << 20)
    assert all(gate.asks() for _ in range(100))


def test_answers_are_bounded_and_age():
    answers = Answers(limit=3, seconds=5.0)
    for key in KEYS[:4]:
        answers.put(key, None, 0.0)
    assert len(answers) == 3
    assert answers.get(KEYS[0], 1.0) is None
    assert answers.get(KEYS[3], 1.0) == (None,)
    assert answers.get(KEYS[3], 5.0) is None
    answers.put(KEYS[4], Found(10, expires=2.0), 0.0)
    assert answers.get(KEYS[4], 1.0) == (Found(10, expires=2.0),)
    assert answers.get(KEYS[4], 2.0) is None


def shared_world(seconds):
    context = simulated_context(tier="far")
    recording = Recording(context, Lasting(context, make_memory(context), shared=True))
    slow = Slow(context, recording, seconds)
    return recording, make_tier("far", slow, context=context, size=None)


def test_a_cold_request_is_not_held_up_by_a_remote_lookup():
    """Promise 2: the budget is a share of the predicted prefill, then the local answer stands."""
    recording, tier = shared_world(0.5)

    async def main():
        manager = make_manager([tier])
        await manager.open()
        manager.report_prefill(1000, 1.0)
        begun = manager.context.clock.now()
        lookup = await manager.lookup(KEYS)  # 6 * 256 tokens: 1.5 s; 5 % of that
        assert manager.context.clock.now() - begun == pytest.approx(0.0768, rel=0.01)
        assert (lookup.leading, lookup.unanswered) == (0, ("far",))
        await manager.aclose()

    run_simulated(main())
    assert recording.capabilities.shared


def test_a_shared_tier_is_not_asked_twice_about_one_request():
    recording, tier = shared_world(0.001)

    async def main():
        manager = make_manager([tier])
        await manager.open()
        await manager.lookup(KEYS)
        assert (await manager.load(KEYS, "me")).reason is Reason.MISS
        assert [call.verb for call in recording.calls] == ["lookup"]
        await manager.context.clock.sleep(6)
        await manager.lookup(KEYS)
        assert len(recording.calls) == 2
        await manager.aclose()

    run_simulated(main())


def test_slow_loads_stop_once_they_are_known_to_be_slow():
    recording, tier = shared_world(0.4)

    async def main():
        manager = make_manager([tier], lookup_budget=1.0)
        await manager.open()
        put(manager, KEYS)
        await manager.flush()
        manager.pool.drop(KEYS)
        loaded = await manager.load(KEYS, "me")
        assert loaded.reason is Reason.COMPLETE
        manager.release(loaded.leases)
        manager.pool.drop(KEYS)
        await manager.context.clock.sleep(0.1)  # the call ends after its last value was handed out
        manager.report_prefill(100_000, 1.0)
        loaded = await manager.load(KEYS, "me")
        assert loaded.reason is Reason.GATE
        skipped = manager.metrics.snapshot().total("lmcache_tier_gate_skips_total", tier="far")
        assert skipped == len(KEYS)
        await manager.aclose()

    run_simulated(main())
    assert recording.calls


def test_hits_and_misses_add_up_in_chunks_and_tokens_at_every_tier():
    """A hit rate that is always 1: LMCache#1260.

    Seen in LMCache#3752.
    """
    _, far = shared_world(0.001)
    near = make_tier("near")

    async def main():
        manager = make_manager([near, far])
        await manager.open()
        put(manager, KEYS[:2])
        await manager.flush()
        put(manager, KEYS[2:4])
        await manager.flush()
        manager.pool.drop(KEYS[2:4])
        await manager.lookup(KEYS, tokens=100)
        await manager.load(KEYS, "me")
        manager.check()
        snapshot = manager.metrics.snapshot()
        assert check_identities(snapshot) == []

        def counted(what, tier):
            return snapshot.total(f"lmcache_tier_{what}_total", tier=tier)

        assert [counted(f"{n}_chunks", "cpu") for n in ("asked", "hit", "missed")] == [12, 4, 8]
        assert [counted(f"{n}_chunks", "near") for n in ("asked", "hit", "missed")] == [8, 4, 4]
        assert [counted(f"{n}_chunks", "far") for n in ("asked", "hit", "missed")] == [4, 0, 4]
        assert counted("asked_tokens", "cpu") == 6 * 100 + 6 * 256
        assert counted("hit_tokens", "near") == 2 * 100 + 2 * 256
        await manager.aclose()

    run_simulated(main())
