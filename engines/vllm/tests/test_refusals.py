"""Engines that a cache cannot serve say so in one line, and run."""

import logging
from types import SimpleNamespace

import pytest
from lmcache_engine_vllm import halves

from engines.vllm.tests.common import PROMPT, served
from engines.vllm.tests.fake import Engine
from engines.vllm.tests.stand_ins import Request, cache_config, config
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
