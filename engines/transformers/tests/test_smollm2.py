"""The same questions to a real model; it is there once `make demo` has run (or LMCACHE_DEMO_HOME names a folder)."""

from functools import cache as once
from typing import Any

import pytest
import torch
import transformers
from lmcache_engine_transformers.demo.command import DOCUMENT, QUESTIONS, tokens_of
from lmcache_engine_transformers.demo.model import READY, home, load, tree

from engines.transformers.tests.test_identity import lora
from engines.transformers.tests.tiny import cached, greedy, open_cache

MODEL = home() / READY
CHUNK = 128
BIG = {"chunk_size": CHUNK, "tiers": [{"cpu": {"size": "256MiB"}}]}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.exists(), reason="no model: run `make demo` once"),
]


@once
def real(dtype: str = "float32") -> tuple[Any, Any]:
    tokenizer, model = load(MODEL, dtype)
    return tokenizer, model


@once
def ids() -> tuple[int, ...]:
    root = tree()
    assert root is not None
    text = (root / DOCUMENT).read_text()[:4000]
    return tuple(tokens_of(real()[0], text, QUESTIONS[0]))


def full(count: int) -> int:
    return count // CHUNK * CHUNK


def test_answers_are_equal_and_every_full_chunk_is_found() -> None:
    _, model = real()
    expected = greedy(model, ids(), tokens=32)
    with open_cache(**BIG) as cache:
        mine = cached(model, cache)
        assert greedy(mine, ids(), tokens=32) == expected
        assert greedy(mine, ids(), tokens=32) == expected
        assert mine.last.reused == (full(len(ids())),)


def test_nothing_is_found_beyond_the_true_common_prefix() -> None:
    _, model = real()
    at = 500
    changed = [*ids()[:at], ids()[at] + 1, *ids()[at + 1 :]]
    with open_cache(**BIG) as cache:
        mine = cached(model, cache)
        greedy(mine, ids(), tokens=1)
        assert greedy(mine, changed) == greedy(model, changed)
        assert mine.last.reused == (full(at),)
        for other in (
            cached(model, cache, tenant="another"),
            cached(real("bf16")[1], cache),
            cached(transformers.LlamaForCausalLM(model.config).eval(), cache),
        ):
            greedy(other, ids(), tokens=1)
            assert other.last.reused == (0,)


def test_an_adapter_parts_from_its_base_model() -> None:
    _, base = load(MODEL, "float32")
    with open_cache(**BIG) as cache:
        greedy(cached(base, cache), ids(), tokens=1)
        model = lora(base)
        mine = cached(model, cache)
        assert greedy(mine, ids()) == greedy(model, ids())
        assert mine.last.reused == (0,)


def test_the_caches_own_code_takes_a_hundredth_of_a_prefill_that_finds_nothing() -> None:
    """Seen in LMCache#1061."""
    _, model = real()
    shares = []
    with open_cache(**BIG) as cache:
        mine = cached(model, cache)
        for turn in range(4):  # the first pays for the digest of the weights and for fresh memory
            greedy(mine, [turn + 5, *ids()], tokens=1)
            assert mine.last.reused == (0,)
            shares.append(mine.last.own / mine.last.first_token)
    assert min(shares) <= 0.01, shares


def test_batches_of_different_lengths_are_equal() -> None:
    _, model = real()
    rows = [list(ids()[:300]), list(ids()[:170]), list(ids())[:415]]
    width = max(map(len, rows))
    batch = {
        "input_ids": torch.tensor([[2] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }
    how = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**batch, **how)
    with open_cache(**BIG) as cache:
        mine = cached(model, cache)
        for _ in range(2):
            assert torch.equal(mine.generate(**batch, **how), expected)
        assert mine.last.reused == (256, 128, 384)
