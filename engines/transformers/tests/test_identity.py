"""What changes the KV changes the key: no hit beyond the true common prefix."""

import warnings

import pytest
import torch
import transformers
from peft import IA3Config, LoraConfig, PeftConfig, PrefixTuningConfig, get_peft_model

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

IDS = prompt(43)


def adapted(model, config: PeftConfig, *, seed: int = 0):
    """A model with an adapter; peft asks transformers in words of yesterday."""
    transformers.set_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(model, config).eval()


def lora(model, *, seed: int = 0, alpha: int = 16):
    config = LoraConfig(
        r=4, lora_alpha=alpha, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    return adapted(model, config, seed=seed)


def reused(model, cache, ids=IDS, **options) -> int:
    """Tokens a model takes from the cache; its answer is its own."""
    mine = cached(model, cache, **options)
    answer = greedy(mine, ids)
    (count,) = mine.last.reused
    assert answer == greedy(model, ids)
    return count


def test_equal_weights_in_another_object_are_the_same_model() -> None:
    with open_cache() as cache:
        assert [reused(make_model(), cache) for _ in range(2)] == [0, 40]


@pytest.mark.parametrize(
    "other",
    [
        lambda: make_model(seed=1),
        lambda: make_model().to(torch.bfloat16),
        lambda: make_model(rope_parameters={"rope_type": "default", "rope_theta": 5000.0}),
        lambda: make_model(rms_norm_eps=1e-3),
        lambda: lora(make_model()),
    ],
    ids=["weights", "dtype", "rope", "epsilon", "adapter"],
)
def test_another_model_takes_nothing(other) -> None:
    with open_cache() as cache:
        reused(make_model(), cache)
        mine = cached(other(), cache)
        greedy(mine, IDS)
        assert mine.last.reused == (0,)


def test_another_tenant_takes_nothing() -> None:
    model = make_model()
    with open_cache() as cache:
        hits = [reused(model, cache, tenant=name) for name in ("a", "b", "", "a")]
    assert hits == [0, 0, 0, 40]


def test_one_changed_token_ends_the_prefix() -> None:
    model = make_model()
    with open_cache() as cache:
        reused(model, cache)
        for at in (0, 7, 8, 30, 42):
            changed = list(IDS)
            changed[at] = 3 + (changed[at] - 2) % 90
            assert reused(model, cache, changed) == at // CHUNK * CHUNK


@pytest.mark.parametrize("elements", [1, None], ids=["one element", "all"])
def test_weights_changed_in_place_are_another_model(elements: int | None) -> None:
    model = make_model()
    with open_cache() as cache:
        mine = cached(model, cache)
        greedy(mine, IDS)
        with torch.no_grad():
            weight = model.model.layers[0].self_attn.v_proj.weight
            weight.view(-1)[200 : 200 + elements if elements else None] += 1.0
        assert greedy(mine, IDS) == greedy(model, IDS)
        assert mine.last.reused == (0,)
        greedy(mine, IDS)
        assert mine.last.reused == (40,)


def test_a_weight_exchanged_for_another_tensor_is_seen() -> None:
    model = make_model()
    with open_cache() as cache:
        mine = cached(model, cache)
        greedy(mine, IDS)
        projection = model.model.layers[1].self_attn.k_proj
        projection.weight = torch.nn.Parameter(projection.weight.detach() * 2)
        greedy(mine, IDS)
        assert mine.last.reused == (0,)


def test_changes_behind_the_back_of_autograd_are_seen_after_refresh() -> None:
    model = make_model()
    with open_cache() as cache:
        mine = cached(model, cache)
        greedy(mine, IDS)
        model.model.layers[0].self_attn.k_proj.weight.data.mul_(2)
        mine.refresh()
        assert greedy(mine, IDS) == greedy(model, IDS)
        assert mine.last.reused == (0,)


def test_adapters_are_told_apart_by_content_scale_and_state() -> None:
    """Seen in LMCache#2961."""
    with open_cache() as cache:
        model = lora(make_model())
        mine = cached(model, cache)

        def hits() -> int:
            assert greedy(mine, IDS) == greedy(model, IDS)
            return mine.last.reused[0]

        assert [hits(), hits()] == [0, 40]
        assert [reused(lora(make_model()), cache), reused(lora(make_model(), seed=1), cache)] == [
            40,
            0,
        ]
        assert reused(lora(make_model(), alpha=32), cache) == 0
        with model.disable_adapter():
            assert [hits(), hits()] == [0, 40]
        assert hits() == 40
        with torch.no_grad():
            next(p for n, p in model.named_parameters() if "lora_B" in n).add_(0.5)
        assert hits() == 0


def test_another_kind_of_adapter_counts_too() -> None:
    config = IA3Config(
        target_modules=["k_proj", "v_proj"], feedforward_modules=[], init_ia3_weights=False
    )
    model = adapted(make_model(), config, seed=3)
    with open_cache() as cache:
        mine = cached(model, cache)
        greedy(mine, IDS)
        with model.disable_adapter():
            greedy(mine, IDS)
            assert mine.last.reused == (0,)
        greedy(mine, IDS)
        assert mine.last.reused == (40,)


def test_models_whose_kv_is_not_that_of_the_tokens_are_refused() -> None:
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1)
    )
    stretched = make_model(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    )
    prefix = adapted(make_model(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with open_cache() as cache:
        for model, why in (
            (t5, "encoder-decoder"),
            (mamba, "recurrent or special state"),
            (prefix, "learned prompts"),
        ):
            with pytest.raises(ConfigError, match=why):
                cached(model, cache)
        with pytest.raises(ConfigError, match="length of the prompt"):
            greedy(cached(stretched, cache), IDS)


def test_padding_on_the_right_and_own_caches_are_refused() -> None:
    model = make_model()
    ids = batch([IDS[:20], IDS[:12]])
    flipped = {name: tensor.flip(1) for name, tensor in ids.items()}
    with open_cache() as cache:
        mine = cached(model, cache)
        with pytest.raises(ValueError, match="padded on the left"):
            mine.generate(**flipped, max_new_tokens=2)
        for name in ("past_key_values", "cache"):
            with pytest.raises(ValueError, match=name):
                mine.generate(**ids, max_new_tokens=2, **{name: object()})
        with pytest.raises(ValueError, match="attention mask"):
            mine.generate(ids["input_ids"], attention_mask=ids["attention_mask"][:, 1:])


def test_input_no_key_names_runs_without_the_cache_and_is_counted() -> None:
    model = make_model()
    ids = torch.tensor([IDS])
    positions = torch.arange(43).unsqueeze(0) + 3
    with open_cache() as cache:
        mine = cached(model, cache)
        greedy(mine, IDS)
        how = {"max_new_tokens": 4, "do_sample": False, "position_ids": positions}
        assert torch.equal(mine.generate(ids, **how), model.generate(ids, **how))
        assert (mine.last.reused, mine.last.stored) == ((0,), (0,))
        model.train()
        greedy(mine, IDS)
        assert mine.last.reused == (0,)
        total = cache.metrics.snapshot().total("lmcache_unkeyed_requests_total")
        assert total == 2
