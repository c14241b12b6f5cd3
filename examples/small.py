"""What the examples share: a tiny model with random weights that reads bytes, and a cache in memory.

Put your own model in place of it: ``AutoModelForCausalLM.from_pretrained(...)`` and its tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import transformers
from lmcache_engine_transformers import CachedModel

from lmcache_core.engine import Cache

PAD = 0


@contextmanager
def small_model(**settings: object) -> Iterator[CachedModel]:
    """A model with a cache in front of it; ``settings`` are those of the cache."""
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, pad_token_id=PAD, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    tiers = [{"cpu": {"size": "256MiB"}}]
    with Cache.from_config(chunk_size=32, tiers=tiers, **settings) as cache:
        yield CachedModel(model, cache)


def generate(model: CachedModel, prompts: Sequence[str], *, tokens: int = 24) -> list[str]:
    """Continue every prompt; prompts of one batch are padded on the left."""
    rows = [list(prompt.encode()) for prompt in prompts]
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
    )
    return [bytes(b % 95 + 32 for b in row[width:].tolist()).decode() for row in output]


def hit_rate(model: CachedModel) -> str:
    """Share of all tokens asked for so far that were found, for people."""
    snapshot = model.cache.metrics.snapshot()
    asked = snapshot.total("lmcache_asked_tokens_total")
    return f"{snapshot.total('lmcache_hit_tokens_total') / max(1, asked):.0%} of {asked:.0f} tokens"
