"""Hit rates on real prefix traffic; ``benchmarks/traces.py`` prints all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmcache_core.policies.arc import ARC
from lmcache_core.policies.fifo import FIFO
from lmcache_core.policies.lru import LRU, LRUConfig
from lmcache_core.spi.policy import EvictionPolicy
from lmcache_core.testing.replay import distinct, oracle_hints, read_trace, replay

TRACES = Path(__file__).parents[1] / "data" / "traces"
REFERENCE = json.loads((TRACES / "reference.json").read_text())
KINDS: dict[str, type[EvictionPolicy]] = {"lru": LRU, "fifo": FIFO, "arc": ARC}
Trace = tuple[str, list[list[int]], int]


@pytest.fixture(scope="module", params=["conversation", "synthetic"])
def trace(request: pytest.FixtureRequest) -> Trace:
    requests = read_trace(TRACES / f"mooncake_{request.param}_trace.jsonl.gz")
    return request.param, requests, distinct(requests)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_hit_rates_are_those_computed_independently(trace: Trace, name: str) -> None:
    title, requests, blocks = trace
    percent = 10 if title == "conversation" else 5
    capacity = blocks * percent // 100
    kind = KINDS[name]
    found = replay(kind(kind.config_type(), capacity), requests, capacity)
    expected = REFERENCE[title][name][REFERENCE["percent"].index(percent)]
    assert abs(found.rate - expected) * 100 <= REFERENCE["tolerance_pp"][name]


@pytest.mark.slow
def test_right_hints_help_and_random_ones_do_no_harm() -> None:
    requests = read_trace(TRACES / "mooncake_conversation_trace.jsonl.gz")
    capacity = distinct(requests) // 10
    plain = REFERENCE["conversation"]["lru"][3]
    right = replay(
        LRU(LRUConfig(), capacity), requests, capacity, hints=oracle_hints(requests, right=0.9)
    )
    assert right.rate - plain >= 0.04
    policy = LRU(LRUConfig(), capacity)
    noise = replay(policy, requests, capacity, hints=oracle_hints(requests, right=0.5))
    assert not policy.heeding
    assert noise.rate - plain >= -0.002


@pytest.mark.slow
def test_switched_off_hints_have_no_effect() -> None:
    requests = read_trace(TRACES / "mooncake_synthetic_trace.jsonl.gz")[:1000]
    hints = oracle_hints(requests)
    deaf = replay(LRU(LRUConfig(hints=False), 500), requests, 500, hints=hints)
    assert deaf == replay(LRU(LRUConfig(), 500), requests, 500)
