"""A prefix that lost tokens is what the model computes when it attends to the others only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache_engine_transformers.dropped import Sparse, without_dropped
from lmcache_engine_transformers.space import cache_argument
from transformers import DynamicCache

from engines.transformers.tests.tiny import (
    CHUNK,
    batch,
    cached,
    greedy,
    make_model,
    open_cache,
    prompt,
)
from lmcache_core.spi import ConfigError

pytest.importorskip("lmcache_serde_drop")


def filled(model: Any, ids: list[int]) -> Any:
    past = DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), use_cache=True, **{cache_argument(model): past})
    return past


def draw_stays(layers: int, tokens: int, keep: int) -> list[torch.Tensor]:
    """Another choice in every layer, as many in all."""
    generator = torch.Generator().manual_seed(3)
    stays = []
    for _ in range(layers):
        stay = torch.zeros(tokens, dtype=torch.bool)
        stay[torch.randperm(tokens, generator=generator)[:keep]] = True
        stays.append(stay)
    return stays


def masked_logits(model: Any, past: Any, stays: list[torch.Tensor], ids: list[int]) -> Any:
    """What a model says that sees the whole cache, and may attend in each layer to some of it only."""
    first, count = len(stays[0]), len(ids)
    causal = torch.ones(count, count).tril().bool()
    hooks = []
    for layer, stay in zip(model.model.layers, stays, strict=True):
        allowed = torch.cat([stay.expand(count, first), causal], 1)[None, None]

        def put(module: Any, args: Any, kwargs: Any, allowed: Any = allowed) -> Any:
            bias = torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))
            return args, kwargs | {"attention_mask": bias}

        hooks.append(layer.self_attn.register_forward_pre_hook(put, with_kwargs=True))
    try:
        with torch.no_grad():
            return model(input_ids=torch.tensor([ids]), **{cache_argument(model): past}).logits
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_new_tokens_attend_to_the_kept_ones_at_their_positions(kind: str) -> None:
    model, known, new = make_model(kind), prompt(40), prompt(5, seed=7)
    stays = draw_stays(3, len(known), 17)
    expected = masked_logits(model, filled(model, known), stays, new)
    past = filled(model, known)
    for layer, stay in zip(past.layers, stays, strict=True):
        for rows in (layer.keys, layer.values):
            rows[:, :, ~stay] = 0
    past = without_dropped(past, alone=True)
    assert all(isinstance(layer, Sparse) for layer in past.layers)
    assert (past.get_seq_length(), past.layers[0].keys.shape[2]) == (40, 17)
    with torch.no_grad():
        found = model(input_ids=torch.tensor([new]), **{cache_argument(model): past}).logits
    assert torch.allclose(found, expected, atol=1e-5)
    keys, values = past.layers[1].whole()
    assert keys.shape[2] == values.shape[2] == 45
    assert not keys[:, :, :40][:, :, ~stays[1]].any()


def settings(folder: Path, *, keep: float = 0.5, recent: int = 2) -> dict[str, Any]:
    drop = {"drop": {"keep": keep, "recent": recent, "exact_tokens": 2}}
    disk = {"path": str(folder), "size": "16MiB", "write": "through", "serde": [drop]}
    return {"tiers": [{"cpu": {"size": "16MiB"}}, {"disk": disk}]}


def stored(folder: Path, model: Any, ids: list[int], **options: Any) -> None:
    with open_cache(**settings(folder, **options)) as cache:
        assert cache.fidelity.startswith("approx:drop")
        greedy(cached(model, cache), ids)


def test_generate_continues_from_what_the_disk_kept(tmp_path: Path) -> None:
    model, ids = make_model(), prompt(5 * CHUNK + 3)
    stored(tmp_path, model, ids)
    with open_cache(**settings(tmp_path)) as cache:
        served = cached(model, cache)
        seen: list[Any] = []
        name = cache_argument(model)
        hook = model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs[name].layers[0]), with_kwargs=True
        )
        first = greedy(served, ids)
        hook.remove()
        assert served.last.reused == (5 * CHUNK,)
        assert isinstance(seen[0], Sparse)
        assert seen[0].dropped == 5 * CHUNK // 2 - 2
        again = greedy(served, ids)
        longer = greedy(served, [*ids, *first, *prompt(CHUNK, seed=9)])
        assert again == first
        assert len(longer) == 8


def test_with_nothing_dropped_answers_are_the_models_own(tmp_path: Path) -> None:
    model, ids = make_model(), prompt(4 * CHUNK + 3)
    stored(tmp_path, model, ids, keep=1.0)
    with open_cache(**settings(tmp_path, keep=1.0)) as cache:
        served = cached(model, cache)
        assert greedy(served, ids) == greedy(model, ids)
        assert served.last.reused == (4 * CHUNK,)


def test_a_batch_computes_from_the_first_dropped_token_on(tmp_path: Path) -> None:
    model, ids, other = make_model(), prompt(3 * CHUNK + 1), prompt(2 * CHUNK, seed=4)
    stored(tmp_path, model, ids)
    with open_cache(**settings(tmp_path)) as cache:
        served, both = cached(model, cache), batch([ids, other])
        found = served.generate(**both, max_new_tokens=6, do_sample=False)
        assert served.last.reused[0] < 3 * CHUNK
        expected = model.generate(**both, max_new_tokens=6, do_sample=False)
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("mistral with a window", "a window counts rows"),
        ("deepseek, keys wider than values", "have 2 shapes"),
    ],
)
def test_models_that_cannot_continue_from_some_tokens_are_refused(
    tmp_path: Path, kind: str, reason: str
) -> None:
    with open_cache(**settings(tmp_path)) as cache, pytest.raises(ConfigError, match=reason):
        cached(make_model(kind), cache)


def test_a_model_made_in_memory_is_not_looked_for_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[object] = []
    monkeypatch.setattr("lmcache_engine_transformers.cached.model_id", looked.append)
    with open_cache(**settings(tmp_path)) as cache:
        cached(make_model(), cache)
    assert looked == []
