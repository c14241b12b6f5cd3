"""Engines that a cache cannot serve say so in one line, and run."""

import logging
from types import SimpleNamespace

import pytest
from lmcache_engine_vllm import halves
from lmcache_engine_vllm.breaker import Breaker

from engines.vllm.tests.common import PROMPT, served
from engines.vllm.tests.fake import Engine
from engines.vllm.tests.stand_ins import BLOCK, Request, SlidingWindowSpec, cache_config, config
from lmcache_core.storage.results import Reason
from tests.wire.daemons import Daemon


@pytest.fixture
def said(caplog, monkeypatch):
    """Warnings so far."""
    monkeypatch.setattr(logging.getLogger("lmcache"), "propagate", True)
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("spread", "why"),
    [
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size spreads the tokens"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size spreads the tokens"),
        ({"nnodes": 2}, "spans hosts"),
        ({"nnodes": 4, "nnodes_within_dp": 2, "data_parallel_size": 2}, "spans hosts"),
    ],
)
def test_an_engine_that_is_spread_otherwise_runs_without_a_cache(daemon, said, spread, why):
    given = config(daemon)
    vars(given.parallel_config).update(spread)
    for scheduling in (True, False):
        made = halves.Halves(given, cache_config(8), scheduling, shared=False)
        made.register_kv_caches({})
        assert made.matched(Request("r", PROMPT, 1), 0) == (0, False)
        made.begin(halves.Step())
        made.load()
        made.save()
        assert made.get_finished(set()) == (None, None)
        made.close()
    lines = [line for line in said() if "runs without a cache" in line]
    assert len(lines) == 2  # one per process
    assert why in lines[0]


def test_states_that_are_not_at_ends_of_blocks_are_not_kept(daemon, said):
    cache = cache_config(8)
    spec = type("MambaSpec", (SimpleNamespace,), {})(block_size=4096, mamba_cache_mode="none")
    cache.kv_cache_groups.append(SimpleNamespace(kv_cache_spec=spec, layer_names=["mixer"]))
    made = halves.Halves(config(daemon), cache, True, shared=False)
    assert made.off
    assert "only with prefix caching" in said()[-1]
    made.close()


def test_what_has_no_effect_here_is_said(daemon, said):
    cache = cache_config(8)
    spec = SlidingWindowSpec(block_size=BLOCK, sliding_window=8)
    cache.kv_cache_groups.append(SimpleNamespace(kv_cache_spec=spec, layer_names=["window"]))
    given = config(daemon, discard_partial_chunks=False, canary=0.5)
    given.kv_transfer_config.kv_connector_extra_config |= {"chunk_size": 8, "use_layerwise": True}
    halves.Halves(given, cache, True, shared=False).close()
    halves.Halves(config(daemon), cache_config(8), True, shared=False).close()
    lines = [line.split(" has no effect")[0] for line in said() if "no effect" in line]
    assert lines == ["chunk_size", "save_partial", "lmcache.canary"]


def test_a_daemon_that_gives_no_answer_is_left_alone_for_longer_each_time(said):
    breaker, client = Breaker(), SimpleNamespace(trouble=None)
    for _ in range(9):
        with breaker.watch(client):
            client.trouble = Reason.DEADLINE
        assert not breaker.closed
    pauses = [float(line.split()[-2]) for line in said()]
    assert pauses[0] < 1.4 and 20 < pauses[-1] < 40
    with breaker.watch(client):
        client.trouble = Reason.FAILED
    assert len(said()) == 9


def test_ranks_that_may_not_write_are_told_what_to_do(tmp_path, model, said):
    with Daemon(tmp_path) as sealed:
        engine = Engine(sealed, model=model, ranks=2)
        assert served(engine, PROMPT) == 0
        engine.pool.reset()
        assert served(engine, PROMPT) == 0
        engine.close()
    lines = [line for line in said() if "nothing is stored" in line]
    assert len(lines) == 1
    assert "--arena-mode shared-rw" in lines[0]
