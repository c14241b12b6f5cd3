"""Tiny models with random weights as vLLM loads them: one folder per kind, each with a tokenizer.

    python engines/vllm/tests/real/models.py FOLDER [KIND...]

The tokenizer knows the words ``t0 ... t2047``, so a text is its ids. The weights are wide enough that the
next token depends on the whole prefix: with wrong keys and values in the cache the answer is another one,
and the two best logits are seldom close.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 2048
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 16384,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": False,
    "initializer_range": 0.08,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    # 4,096 tokens of it are 67 MB of keys and values in float32: the model of the benchmarks
    "llama-bench": (
        "Llama",
        {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8,
         "num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "window": (  # every second layer sees the last 256 tokens only: two groups
        "Gemma3Text",
        {"sliding_window": 256, "query_pre_attn_scalar": 64,
         "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "mla": (
        "DeepseekV3",
        {"num_key_value_heads": 4, "head_dim": None, "q_lora_rank": None, "kv_lora_rank": 512,
         "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
         "first_k_dense_replace": 4, "n_routed_experts": 4, "n_shared_experts": 1,
         "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1},
    ),
    "mamba": (  # two-dimensional states beside attention, as Granite 4 has them
        "GraniteMoeHybrid",
        {"layer_types": ["mamba", "attention"] * 2, "head_dim": None, "num_local_experts": 0,
         "num_experts_per_tok": 0, "shared_intermediate_size": 512, "mamba_n_heads": 8, "mamba_n_groups": 1,
         "mamba_d_state": 64, "mamba_d_head": 64, "mamba_d_conv": 4, "mamba_expand": 2,
         "mamba_chunk_size": 256, "position_embedding_type": "rope"},
    ),
    "gated": (  # gated delta nets beside attention, as Qwen3-Next has them; vLLM computes them with experts
        "Qwen3Next",
        {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 4,
         "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
         "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 1, "decoder_sparse_step": 1,
         "mlp_only_layers": [], "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
         "partial_rotary_factor": 0.25},
    ),
    "hybrid": (  # short convolutions beside attention: a recurrent state and pages
        "Lfm2",
        {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "conv_bias": False,
         "block_dim": 256, "conv_dim": 256, "block_auto_adjust_ff_dim": False},
    ),
}  # fmt: skip


def make(folder: Path, kind: str) -> Path:
    """The folder of one kind, made where it is not there; two makers at once are fine."""
    ready = folder / kind
    if ready.exists():
        return ready
    import torch
    import transformers

    name, own = KINDS[kind]
    wanted = {key: value for key, value in (COMMON | own).items() if value is not None}
    if name == "DeepseekV3":
        wanted["q_lora_rank"] = None  # here None says something: queries are not compressed
    config = getattr(transformers, f"{name}Config")(**wanted)
    transformers.set_seed(20)
    stem = name.removesuffix("Text")
    model = getattr(transformers, f"{stem}ForCausalLM")(config).to(torch.float32).eval()
    work = folder / f"{kind}.{os.getpid()}"
    model.save_pretrained(work)
    tokenizer().save_pretrained(work)
    try:
        work.rename(ready)
    except OSError:  # another run was faster
        shutil.rmtree(work)
    return ready


def adapter(folder: Path, seed: int, model: Path) -> Path:
    """A random adapter of the attention of a tiny model, as PEFT writes one; large enough that every answer changes."""
    import torch
    from safetensors.torch import save_file

    said = json.loads((model / "config.json").read_text())
    hidden, head = said["hidden_size"], said["head_dim"]
    outs = {"q_proj": head * said["num_attention_heads"], "k_proj": head * said["num_key_value_heads"],
            "v_proj": head * said["num_key_value_heads"]}  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(said["num_hidden_layers"]):
        for name, out in outs.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{stem}.lora_A.weight"] = torch.randn(8, hidden, generator=draw) * 0.1
            weights[f"{stem}.lora_B.weight"] = torch.randn(out, 8, generator=draw) * 0.1
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "bias": "none",
              "target_modules": sorted(outs), "base_model_name_or_path": str(model)}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def tokenizer() -> Any:
    """Words to ids and back: ``t7 t8`` is [7, 8]."""
    import tokenizers
    import transformers

    words = {f"t{number}": number for number in range(VOCABULARY)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t3"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="t0", eos_token="t1", pad_token="t2", unk_token="t3"
    )


if __name__ == "__main__":
    for wanted_kind in sys.argv[2:] or KINDS:
        print(make(Path(sys.argv[1]), wanted_kind))  # noqa: T201
