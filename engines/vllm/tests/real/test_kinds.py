"""Other shapes of keys and values, each against the same engine without a cache: what vLLM runs on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine import Answer, Engine, daemon
from judging import PAGE, differences, full, make_prompts

LONG = bool(os.environ.get("LMCACHE_TEST_LONG"))
OPTIONS = {"max_num_batched_tokens": 512}
PROMPTS = make_prompts(9, seed=5, longest=800)[3:]


@pytest.mark.parametrize(
    "kind", ["qwen2", "qwen3", "window", "mamba", "gated"] if LONG else ["window"]
)
def test_equal_answers_and_every_block_served(
    kind: str, model: Callable[[str], Path], folder: Path
) -> None:
    """Of Mamba's states there is one per block of 256 tokens; vLLM on CPU fails when a step has more.

    Gated delta nets it computes in bfloat16 only, where other steps round otherwise: both engines take the same.
    """
    page, options = (256, {"max_num_batched_tokens": 256}) if kind == "mamba" else (PAGE, OPTIONS)
    few: dict[str, Any] = {"max_num_seqs": 4}
    if kind == "gated":
        few |= {"dtype": "bfloat16", "enable_prefix_caching": True}
        options = {}
    plain = asked_without(model(kind), folder / f"{kind}-plain.log", **few)
    log = folder / f"{kind}.log"
    with (
        daemon(folder / kind, "--chunk-size", "16") as running,
        Engine(model(kind), log, running.connector, running.env, options | few) as engine,
    ):
        differences(engine.generate(PROMPTS, one_by_one=True), plain)
        assert engine.call("reset_prefix_cache")
        before = engine.call("external")
        answers = engine.generate(PROMPTS, one_by_one=True)
        differences(answers, plain)
        assert [answer.cached for answer in answers] == [full(len(p), page) for p in PROMPTS]
        assert engine.call("external") > before


@pytest.mark.parametrize("kind", ["mla", "hybrid"] if LONG else ["mla"])
def test_what_vllm_itself_cannot_reuse_on_a_cpu_runs_without_a_cache_and_says_so(
    kind: str, model: Callable[[str], Path], folder: Path
) -> None:
    """Its attention over latents ignores what came before; its hybrid models answer otherwise after own hits.

    Seen in LMCache#2845.
    """
    own = kind == "hybrid"
    plain = asked_without(model(kind), folder / f"{kind}-plain.log", enable_prefix_caching=own)
    log = folder / f"{kind}.log"
    with (
        daemon(folder / kind, "--chunk-size", "16") as running,
        Engine(model(kind), log, running.connector, running.env, OPTIONS) as engine,
    ):
        differences(engine.generate(PROMPTS, one_by_one=True), plain)
        assert engine.call("external") == 0
    assert log.read_text(errors="replace").count("runs without a cache") >= 1


def asked_without(path: Path, log: Path, **options: Any) -> list[Answer]:
    """What the engine says without us."""
    with Engine(path, log, options={"enable_prefix_caching": False} | options) as engine:
        return engine.generate(PROMPTS, one_by_one=True)
