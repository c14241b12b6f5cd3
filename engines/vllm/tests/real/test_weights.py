"""Weights that change in place, as a training loop does it, under the name whose wrapper swallows ``reset_cache``."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import Engine
from judging import every_block

DRAW = random.Random(11)
PROMPTS = [DRAW.choices(range(4, 2048), k=length) for length in (300, 450)]
SHORT: dict[str, Any] = {"tokens": 8, "one_by_one": True}
CHANGE = """llm.apply_model(lambda model: model.model.embed_tokens.weight.data.copy_(
    model.model.embed_tokens.weight.data.roll(1, 0)) is None)"""


def test_new_weights_find_nothing_that_the_old_ones_have_computed(
    model: Callable[[str], Path], folder: Path
) -> None:
    connector = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    env = {"LMCACHE_RUNTIME_DIR": str(folder / "run"), "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.3", "LMCACHE_CHUNK_SIZE": "128"}  # fmt: skip
    with Engine(model("llama"), folder / "weights.log", connector, env) as engine:
        old = engine.generate(PROMPTS, **SHORT)
        assert engine.call("reset_prefix_cache")
        every_block(engine, PROMPTS, old, **SHORT)
        engine.call("evaluate", CHANGE)
        assert engine.call("reset_all")
        new = engine.generate(PROMPTS, **SHORT)
        assert [answer.cached for answer in new] == [0] * len(PROMPTS)
        assert all(a.tokens != b.tokens for a, b in zip(old, new, strict=True))
        assert engine.call("reset_prefix_cache")
        every_block(engine, PROMPTS, new, **SHORT)
