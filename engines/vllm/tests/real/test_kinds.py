"""Other shapes of keys and values, each against the same engine without a cache: what vLLM runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engine import Engine, daemon
from judging import differences, make_prompts

PROMPTS = make_prompts(9, seed=5, longest=800)[3:]


@pytest.mark.parametrize(
    ("kind", "all_or_nothing"),
    [
        ("qwen3", True),
        ("window", False),  # blocks outside of the window are not kept
        ("mla", True),
        ("hybrid", False),  # a state is there only where the engine stopped
    ],
)
def test_equal_answers_and_hits(
    kind: str, all_or_nothing: bool, model: Callable[[str], Path], folder: Path
) -> None:
    path = model(kind)
    # vLLM itself answers differently from a hybrid model when its prefix caching is on, hit or miss
    own = kind == "hybrid"
    with Engine(
        path, folder / f"{kind}-plain.log", options={"enable_prefix_caching": own}
    ) as engine:
        plain = engine.generate(PROMPTS, one_by_one=True)
    options = {"max_num_batched_tokens": 512}
    with (
        daemon(folder / kind, "--chunk-size", "16") as running,
        Engine(path, folder / f"{kind}.log", running.connector, running.env, options) as engine,
    ):
        differences(engine.generate(PROMPTS, one_by_one=True), plain)
        assert engine.call("reset_prefix_cache")
        before = engine.call("external")
        answers = engine.generate(PROMPTS, one_by_one=True)
        differences(answers, plain)
        page = engine.call("evaluate", "llm.llm_engine.vllm_config.cache_config.block_size")
        served = [answer.cached for answer in answers]
        print(kind, "page", page, "served", served, "of", [len(p) for p in PROMPTS])  # noqa: T201
        if all_or_nothing:
            assert served == [(len(prompt) - 1) // page * page for prompt in PROMPTS]
        assert engine.call("external") > before
