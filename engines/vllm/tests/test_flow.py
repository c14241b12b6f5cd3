"""One request after another: hits, misses, chunks, preemption, wishes."""

import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from lmcache_engine_vllm import scheduler

from engines.vllm.tests.common import PROMPT, forget, keys, lose_leases, served, settled
from engines.vllm.tests.fake import Engine
from engines.vllm.tests.stand_ins import next_token
from lmcache_core.wire.client import DaemonClient
from tests.wire.daemons import Daemon, wait_for


def test_second_request_is_served_from_the_cache(make):
    engine = make()
    assert served(engine, PROMPT) == 0
    engine.pool.reset()
    assert served(engine, PROMPT) == 40
    assert engine.external == 40


def test_restarted_engine_is_served_every_full_chunk(make):
    """Seen in LMCache#4492."""
    assert served(make(), PROMPT) == 0
    assert served(make(), PROMPT) == 40


def test_two_engines_share_one_daemon(make):
    first, second = make(), make()
    assert served(first, PROMPT[:24]) == 0
    assert served(second, PROMPT) == 24
    first.pool.reset()
    assert served(first, PROMPT) == 40


def test_engines_prefix_cache_counts_first(make):
    """Seen in LMCache#2206, LMCache#832."""
    engine = make(budget=64)
    served(engine, PROMPT)
    assert served(engine, PROMPT[:20] + [7] * 20) == 20
    assert engine.external == 0


def test_load_begins_inside_a_chunk(make):
    """Seen in LMCache#727."""
    served(make(), PROMPT)
    engine = make(blocks=40)
    served(engine, PROMPT[:14], skip := 1)
    assert skip and engine.external == 8
    assert served(engine, [*PROMPT[:13], 7]) == 12  # its own, half a chunk
    engine.external = 0
    assert served(engine, PROMPT) == 40
    assert engine.external == 40 - 12


def test_a_full_hit_leaves_one_block_to_compute(make):
    """Seen in LMCache#3322."""
    served(make(), PROMPT[:40])
    assert served(make(), PROMPT[:40]) == 36


def test_what_the_engine_had_by_itself_is_kept_too(make, daemon):
    """Seen in LMCache#2574."""
    engine = make(budget=64)
    served(engine, PROMPT[:24])
    forget(daemon)
    served(engine, PROMPT)
    assert served(make(), PROMPT) == 40


def test_preempted_requests_come_back_from_the_cache(make):
    """Seen in LMCache#4612."""
    engine = make(blocks=16, budget=64)
    ids = [engine.add([n] * 20, 12) for n in range(3)]
    engine.run()
    assert all(len(engine.outputs[id]) == 32 for id in ids)
    assert engine.external > 0


def test_a_request_waits_for_its_load_in_the_background(make, monkeypatch):
    """Seen in LMCache#1960."""
    served(make(), PROMPT)
    engine = make(async_load=True)
    assert served(engine, PROMPT) == 40
    engine.pool.reset()
    with monkeypatch.context() as planted:
        lose_leases(planted, engine.worker)
        served(engine, PROMPT)
    assert engine.recomputed >= 1
    engine.pool.reset()
    aborted = engine.add(PROMPT)
    engine.step()
    engine.abort(aborted)
    engine.run()
    assert served(engine, PROMPT) == 40


@contextmanager
def restarted(tmp_path, model, **how):
    """An engine whose daemon has the first five chunks of ``PROMPT`` on disk, not in memory."""
    settings = tmp_path / "cache.yaml"
    tiers = f"[{{cpu: {{size: 64MiB}}}}, {{disk: {{path: {tmp_path}/kv, size: 256MiB}}}}]"
    settings.write_text(f"chunk_size: 8\nmanager: {{cost_gate: false}}\ntiers: {tiers}\n")
    with Daemon(tmp_path, "--arena-mode", "shared-rw", "--config", str(settings)) as daemon:
        engine = Engine(daemon, model=model, **how)
        served(engine, PROMPT)
        engine.scheduler.client.flush()
        daemon.kill()
        daemon.start()
        for half in (engine.scheduler, engine.worker):
            wait_for(lambda half=half: half.client.home is not None)
        engine.pool.reset()
        served(engine, [7] * 9)  # ranks meet the new daemon with their next step
        wait_for(engine.scheduler.scheduler.names.ready)
        found = engine.scheduler.client.lookup
        wait_for(lambda: found(keys(engine)).leading == 5)  # the tier knows its own again
        yield engine
        engine.close()


def test_a_request_waits_for_what_a_lower_tier_has(tmp_path, model, monkeypatch):
    monkeypatch.setattr(scheduler, "RESIDENT", 0.0)
    with restarted(tmp_path, model) as engine:
        id = engine.add(PROMPT)
        asked = engine.scheduler.scheduler
        began = time.monotonic()
        said = [engine.scheduler.matched(engine.requests[id], 0)[0]]
        wait_for(lambda: said.append(asked.matched(engine.requests[id], 0)) or said[-1])
        assert said[0] is None
        assert time.monotonic() - began < scheduler.PATIENCE / 2  # it is told when they are there
        assert said[-1] == 40
        engine.run()
        assert engine.recomputed == 0


def test_lower_tiers_bring_up_what_a_request_wants_before_its_turn(tmp_path, model):
    with restarted(tmp_path, model, eager_prefetch=True) as engine:

        def resident():
            return [
                place and place.tier
                for place in engine.scheduler.client.lookup(keys(engine)).places
            ]

        assert set(resident()[:5]) == {"disk"}
        id = engine.add(PROMPT)
        wait_for(lambda: "disk" not in resident()[:5])
        assert engine.scheduler.matched(engine.requests[id], 0)[0] == 40
        engine.run()
        assert engine.recomputed == 0


def test_what_was_refused_when_a_request_came_is_brought_up_in_its_turn(
    tmp_path, model, monkeypatch
):
    """Of a crowd that comes at once, most are refused."""
    monkeypatch.setattr(scheduler, "RESIDENT", 0.0)
    with restarted(tmp_path, model, eager_prefetch=True) as engine:
        with monkeypatch.context() as crowded:
            crowded.setattr(DaemonClient, "prefetch", lambda *_, **__: lambda: True)
            id = engine.add(PROMPT)
        said = [engine.scheduler.matched(engine.requests[id], 0)[0]]
        assert said[0] is None
        wait_for(
            lambda: said.append(engine.scheduler.matched(engine.requests[id], 0)[0]) or said[-1]
        )
        assert said[-1] == 40
        engine.run()
        assert engine.recomputed == 0


def test_changed_weights_find_nothing_of_the_old_ones(make):
    """Seen in sglang#24758."""
    engine = make()
    assert served(engine, PROMPT) == 0
    running = engine.add(PROMPT, 4)
    engine.step()
    engine.reset("new weights")
    engine.run()
    assert engine.outputs[running]
    assert served(engine, PROMPT) == 40
    engine.reset("newer weights")
    assert served(engine, PROMPT) == 0


def test_salts_and_wishes_separate(make):
    engine = make()
    served(engine, PROMPT, cache_salt="a")
    engine.pool.reset()
    assert served(engine, PROMPT, cache_salt="b") == 0
    engine.pool.reset()
    assert served(engine, PROMPT, cache_salt="a") == 40
    engine.pool.reset()
    assert served(engine, [1] * 20, kv_transfer_params={"lmcache.skip_save": True}) == 0
    engine.pool.reset()
    assert served(engine, [1] * 20, kv_transfer_params={"lmcache.max_offload_tokens": 8}) == 0
    engine.pool.reset()
    assert served(engine, [1] * 20) == 8


def test_tagged_requests_can_be_deleted(make):
    engine = make()
    served(engine, PROMPT, kv_transfer_params={"lmcache.tag.user": "eve"})
    engine.pool.reset()
    assert served(engine, PROMPT) == 40
    assert engine.scheduler.client.invalidate("user=eve") == 5
    engine.pool.reset()
    assert served(engine, PROMPT) == 0


def test_embeddings_run_without_the_cache(make):
    engine = make()
    served(engine, PROMPT, prompt_embeds=object())
    engine.pool.reset()
    assert served(engine, PROMPT) == 0


@pytest.mark.parametrize("replicas", [1, 2])
def test_ranks_fill_and_read_chunks_together(make, replicas):
    assert served(make(ranks=2, replicas=replicas), PROMPT) == 0
    engine = make(ranks=2, replicas=replicas)
    assert served(engine, PROMPT) == 40
    tagged = {"lmcache.tag.user": "eve"}
    assert served(engine, [5] * 20, kv_transfer_params=tagged) == 0
    engine.pool.reset()
    assert served(engine, [5] * 20) == 16
    assert served(make(), PROMPT) == 0  # another way to cut, another space


def test_roles_go_one_way(make):
    consumer = make(role="kv_consumer")
    served(consumer, PROMPT)
    producer = make(role="kv_producer")
    assert served(producer, PROMPT) == 0
    producer.pool.reset()
    assert served(producer, PROMPT) == 0
    assert served(consumer, PROMPT[:33]) == 32


def test_generated_tokens_are_kept_when_asked_for(make):
    engine = make(save_decode_cache=True)
    served(engine, PROMPT[:10], 20)
    whole = PROMPT[:10]
    for _ in range(20):
        whole.append(next_token(whole))
    engine.pool.reset()
    assert served(engine, [*whole, 1]) == 24


def test_last_tokens_of_a_prompt_are_left_out_when_asked_for(make):
    engine = make(skip_last_n_tokens=10)
    served(engine, PROMPT)
    engine.pool.reset()
    assert served(engine, PROMPT) == 24


def test_aborted_and_finished_requests_leave_nothing_behind(make, daemon):
    """Seen in sglang#37103, vllm#44100."""
    engine = make(blocks=14)
    served(engine, PROMPT)
    engine.pool.reset()
    ids = [engine.add(PROMPT, 5) for _ in range(4)]
    engine.step()
    for id in ids:
        engine.abort(id)
    engine.run()
    settled(daemon)


def test_failure_policy_is_set_so_that_a_lost_cache_fails_no_request(make):
    assert make().given.kv_transfer_config.kv_load_failure_policy == "recompute"
    keep = make(load_failure_policy="keep")
    assert keep.given.kv_transfer_config.kv_load_failure_policy == "fail"
    assert isinstance(keep.scheduler.client, DaemonClient)


def test_what_is_kept_is_announced_once_it_is_visible(make):
    """Seen in dynamo#5565, LMCache#3532."""
    engine = make(budget=20)
    served(engine, PROMPT)
    events = engine.worker.events()
    assert [token for event in events for token in event.token_ids] == PROMPT[:40]
    assert [event.parent_block_hash for event in events[1:]] == [
        event.block_hashes[0] for event in events[:-1]
    ]
    assert events[0].parent_block_hash is None
    engine.pool.reset()
    served(engine, PROMPT)
    assert engine.worker.events() == []


def test_what_is_kept_of_an_adapter_is_announced_as_such(make, tmp_path):
    """Routers that go by token ids would send requests of the bare model there."""
    (tmp_path / "adapter_model.safetensors").write_bytes(b"1" * 64)
    lora = SimpleNamespace(lora_path=str(tmp_path), lora_int_id=3, lora_name="style")
    engine = make(budget=64)
    served(engine, PROMPT, lora_request=lora)
    served(engine, [7] * 20)
    said = [(event.lora_id, event.lora_name) for event in engine.worker.events()]
    assert said == [(3, "style")] * 5 + [(None, None)] * 2


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("most", [0, 12])
def test_less_than_was_offered_may_be_taken(make, most, background):
    """Seen in vllm#20609, RBLN-SW/vllm-rbln#1009."""
    served(make(), PROMPT)
    engine = make(most=most, async_load=background)
    assert served(engine, PROMPT) == most
    engine.most = None
    engine.pool.reset()
    assert served(engine, PROMPT) == 40
