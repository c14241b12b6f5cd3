"""Tiny models with random weights, one per kind of attention, and what the tests ask of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from lmcache_engine_transformers import CachedModel

from lmcache_core.engine import Cache

torch.set_num_threads(
    1
)  # more threads than work makes these models slower, on a busy machine very much
COMMON = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 6, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "mistral with a window": ("Mistral", {"sliding_window": 24}),
    "gemma3, every third layer global": (
        "Gemma3Text",
        {"head_dim": 8, "sliding_window": 16, "sliding_window_pattern": 3, "num_hidden_layers": 3},
    ),
    "deepseek, keys wider than values": ("DeepseekV3", LATENT),
}
CHUNK = 8


def make_model(kind: str = "llama", *, seed: int = 0, **more: Any) -> Any:
    """A model in float32, from a seed."""
    name, own = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**COMMON | own | more)
    transformers.set_seed(seed)
    stem = name.removesuffix("Text")
    return getattr(transformers, f"{stem}ForCausalLM")(config).to(torch.float32).eval()


def prompt(length: int, *, seed: int = 1) -> list[int]:
    """Random ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (length,), generator=generator).tolist()


def batch(prompts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Padded on the left."""
    width = max(map(len, prompts))
    ids = [[2] * (width - len(each)) + list(each) for each in prompts]
    mask = [[0] * (width - len(each)) + [1] * len(each) for each in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@contextmanager
def open_cache(**settings: Any) -> Iterator[Cache]:
    """A cache in memory, every hot load verified."""
    given = {
        "manager": {"cost_gate": False},
        "chunk_size": CHUNK,
        "verify_hot": "always",
        "tiers": [{"cpu": {"size": "16MiB"}}],
    }
    with Cache.from_config(given | settings) as cache:
        yield cache
        cache.flush()  # a writer has leases of its own
        stock = cache.storage.manager.pool.accounting()
        assert (stock.leased, stock.reserved) == (0, 0)
        cache.storage.manager.check()


def greedy(model: Any, ids: Sequence[int], *, tokens: int = 8, **options: Any) -> list[int]:
    """The next tokens, as ids."""
    output = model.generate(
        torch.tensor([list(ids)]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=tokens,
        do_sample=False,
        **options,
    )
    return output[0, len(ids) :].tolist()


def cached(model: Any, cache: Cache, **options: Any) -> CachedModel:
    return CachedModel(model, cache, **options)
