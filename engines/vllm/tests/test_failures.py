"""What is lost, damaged or wrong is computed again, and nothing that rests on it is kept."""

import pytest

from engines.vllm.tests.common import PROMPT, keys, lose_leases, served
from tests.wire.daemons import wait_for


def test_a_cache_whose_loads_keep_failing_is_left_alone(make, monkeypatch):
    served(make(), PROMPT)
    engine = make()
    with monkeypatch.context() as planted:
        lose_leases(planted, engine.worker)
        for failures in range(5):
            engine.pool.reset()
            served(engine, PROMPT)
            assert engine.recomputed == min(3, failures + 1)


def test_lost_leases_are_reported_and_computed_again(make, monkeypatch):
    """Seen in LMCache#3388, vllm#20063."""
    served(make(), PROMPT)
    engine = make()
    with monkeypatch.context() as planted:
        lose_leases(planted, engine.worker)
        assert served(engine, PROMPT) == 40
    assert engine.recomputed == 1
    engine.pool.reset()
    assert served(engine, PROMPT) == 40
    assert engine.recomputed == 1


def test_nothing_that_rests_on_a_failed_load_is_kept(make, monkeypatch):
    """A second request reads the failed blocks in the same step; its chunks must not be kept."""
    served(make(), PROMPT[:24])
    engine = make(budget=200, blocks=60)
    with monkeypatch.context() as planted:
        lose_leases(planted, engine.worker)
        first, second = engine.add(PROMPT), engine.add(PROMPT[:24] + [9] * 16)
        engine.run()
    assert {first, second} == engine.outputs.keys()
    other = make()
    served(other, PROMPT)
    served(other, PROMPT[:24] + [9] * 16)
    assert other.recomputed == 0


def test_damage_in_memory_is_found_when_every_load_is_verified(make, daemon):
    engine = make(verify_hot="always")
    served(engine, PROMPT)
    leases = engine.scheduler.client.load(keys(engine), None).leases
    leases.home.view(leases[2].extent)[-1] ^= 1
    engine.scheduler.client.release(leases)
    engine.pool.reset()
    assert served(engine, PROMPT) == 40
    assert engine.recomputed == 1
    engine.pool.reset()
    assert served(engine, PROMPT) == 40
    assert engine.recomputed == 1


def test_damage_is_found_in_a_chunk_of_which_only_a_part_is_loaded(make):
    """The prompt ends with the chunk, whose last block is computed."""
    engine = make(verify_hot="always")
    served(engine, PROMPT)
    leases = engine.scheduler.client.load(keys(engine), None).leases
    leases.home.view(leases[4].extent)[engine.worker.worker.kept[0].room] ^= 1
    engine.scheduler.client.release(leases)
    engine.pool.reset()
    assert served(engine, PROMPT[:40]) == 36
    assert engine.recomputed == 1


def test_canary_finds_a_hit_that_is_not_what_is_computed(make):
    engine = make(canary=1.0)
    served(engine, PROMPT)
    engine.pool.reset()
    assert served(engine, PROMPT) == 0
    counted = engine.worker.tally.take()
    assert counted["lmcache_canary_tokens_total"] == 40
    assert "lmcache_canary_differing_tokens_total" not in counted
    leases = engine.scheduler.client.load(keys(engine), None).leases
    leases.home.view(leases[2].extent)[-1] ^= 1
    engine.scheduler.client.release(leases)
    engine.pool.reset()
    assert served(engine, PROMPT) == 0
    assert engine.worker.tally.take()["lmcache_canary_differing_tokens_total"] == 8
    assert engine.worker.worker.poisoned
    forget_canary = make()
    assert served(forget_canary, PROMPT[:16]) == 12


@pytest.mark.parametrize("replicas", [1, 2])
def test_one_rank_that_failed_keeps_all_from_keeping(make, monkeypatch, replicas):
    """Seen in LMCache#5344."""
    served(make(ranks=2, replicas=replicas), PROMPT[:24])
    engine = make(ranks=2, replicas=replicas, budget=200, blocks=60)
    with monkeypatch.context() as planted:
        lose_leases(planted, engine.workers[1])
        engine.add(PROMPT)
        engine.add(PROMPT[:24] + [9] * 16)
        engine.run()
    other = make(ranks=2, replicas=replicas)
    served(other, PROMPT)
    served(other, PROMPT[:24] + [9] * 16)
    assert other.recomputed == 0 and engine.recomputed


def test_an_error_of_our_own_switches_the_cache_off_and_loses_nothing(make, monkeypatch):
    """Seen in vllm#44249."""
    served(make(), PROMPT)
    engine = make()

    def broken(*given, **how):
        raise RuntimeError("planted")

    monkeypatch.setattr(engine.worker.worker, "fill", broken)
    assert served(engine, PROMPT) == 40
    assert engine.worker.off and engine.recomputed == 1
    other = make()
    monkeypatch.setattr(other.scheduler.scheduler, "_store", broken)
    assert served(other, PROMPT) == 40
    assert other.scheduler.off and other.recomputed == 0
    other.pool.reset()
    assert served(other, PROMPT) == 0


def test_an_error_while_events_are_taken_ends_no_engine(make, monkeypatch):
    """A machine may have no thread left for who follows them."""

    def broken(*given):
        raise RuntimeError("can't start new thread")

    engine = make()
    monkeypatch.setattr(engine.scheduler.leaving, "taken", broken)
    assert engine.scheduler.gone() == ([], False)
    assert engine.scheduler.off
    assert served(engine, PROMPT) == 0


@pytest.mark.parametrize("background", [False, True])
def test_an_error_while_loads_are_ordered_strands_no_request(make, monkeypatch, background):
    served(make(), PROMPT)
    engine = make(async_load=background, blocks=60, budget=200)

    def broken(*given):
        raise RuntimeError("planted")

    monkeypatch.setattr(engine.scheduler.client, "dispatch", broken)
    ids = {engine.add(PROMPT), engine.add(PROMPT), engine.add(PROMPT[:24] + [9] * 16)}
    engine.run()
    assert ids == engine.outputs.keys()
    assert engine.scheduler.off and engine.external


def test_a_half_that_is_off_orders_no_load_again(make, monkeypatch):
    """A second copy would go into blocks that are another request's by then."""
    served(make(), PROMPT)
    engine, loads = make(blocks=60, budget=200), []
    real = engine.scheduler.build

    def watched(out):
        step = real(out)
        loads.extend(step.loads)
        return step

    def broken(*given):
        raise RuntimeError("planted")

    monkeypatch.setattr(engine.scheduler, "build", watched)
    engine.add(PROMPT, 4)
    engine.step()
    assert len(loads) == 1
    monkeypatch.setattr(engine.scheduler.scheduler, "matched", broken)
    engine.add([9] * 20, 4)
    engine.run()
    assert engine.scheduler.off and len(loads) == 1


def test_daemon_that_is_lost_is_a_miss_and_comes_back(make, monkeypatch):
    engine = make()
    served(engine, PROMPT)
    engine.pool.reset()
    id = engine.add(PROMPT)
    assert engine.scheduler.matched(engine.requests[id], 0)[0] == 40
    with monkeypatch.context() as planted:
        for half in (engine.scheduler, engine.worker):
            planted.setattr(half.client, "connect", lambda: False)
            half.client._lost(half.client.home)
        engine.run()  # the offer was leased and mapped: it is kept
        assert engine.external == 40 and engine.recomputed == 0
        engine.pool.reset()
        assert served(engine, PROMPT) == 0
    for half in (engine.scheduler, engine.worker):
        wait_for(lambda half=half: half.client.home is not None)
    engine.pool.reset()
    assert served(engine, PROMPT) == 40
