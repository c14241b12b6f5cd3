"""Key space of a model in memory: what its KV is valid for, read off the live object."""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lmcache_core import ops
from lmcache_core.identity import FORMAT, Adapter, Group, KeySpace, Rope
from lmcache_core.spi import ConfigError, Interior, Reuse

PREPARE = inspect.signature(GenerationMixin.prepare_inputs_for_generation)
CACHE = "cache" if "cache" in PREPARE.parameters else "past_key_values"
"""What ``generate`` of the installed transformers calls its cache."""
VOLATILE = {
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id",
    "output_attentions", "output_hidden_states", "pad_token_id", "return_dict", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip
"""Configuration that does not change the KV of a prefix."""
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary embeddings whose rotation of a prefix depends on the length of the whole prompt."""


@dataclass(frozen=True, slots=True)
class Planes:
    """Layers whose keys (or values) look alike: one layout group.

    Attributes:
        plane: 0 for keys, 1 for values, None for both in one group.
        layers: ascending.
        heads, head_dim: of one layer.
    """

    plane: int | None
    layers: tuple[int, ...]
    heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def planes(self) -> tuple[int, ...]:
        """Numbers of the planes in this group."""
        return (0, 1) if self.plane is None else (self.plane,)

    def group(self, chunk_tokens: int) -> Group:
        """The layout group as identity sees it."""
        return Group(
            reuse=Reuse.ALL,
            window=0,
            tokens_per_chunk=chunk_tokens,
            layers=self.layers,
            heads=self.heads,
            head_range=(0, self.heads),
            head_dim=self.head_dim,
            planes=2 if self.plane is None else 1,
            dtype=str(self.dtype).removeprefix("torch."),
            interior=Interior.ROWS,
            page_size=None,
            encoding=None,
            engine=None,
        )


def cache_argument(model: PreTrainedModel) -> str:
    """What ``forward`` of a model calls its cache."""
    known = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in known), CACHE)


def probe_layout(model: PreTrainedModel) -> tuple[Planes, ...]:
    """Run one token through the model and read the shapes of its cache.

    Raises:
        ConfigError: the model keeps something else than keys and values of every token.
    """
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise ConfigError(
            f"{type(model).__name__} is an encoder-decoder model: its decoder KV depends on the encoder's "
            "input; use a decoder-only model"
        )
    tuning = getattr(model, "active_peft_config", None)
    if getattr(tuning, "is_prompt_learning", False):
        raise ConfigError(
            f"{type(model).__name__} puts learned prompts in front of every prompt; only adapters of "
            "weights can be used with a cache"
        )
    for layer in DynamicCache(config=config).layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ConfigError(
                f"{type(model).__name__} keeps a recurrent or special state ({type(layer).__name__}); "
                "only keys and values of every token can be reused"
            )
    cache: Any = DynamicCache()
    ids = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **{cache_argument(model): cache})
    alike: dict[tuple[Any, ...], list[int]] = {}
    for index, layer in enumerate(cache.layers):
        keys, values = layer.keys, layer.values
        if keys is None or values is None or keys.shape[2] != 1:
            raise ConfigError(
                f"layer {index} of {type(model).__name__} stores no keys of its own (shared KV); "
                "such models cannot be cached yet"
            )
        alike.setdefault(
            (keys.shape[1], keys.shape[3], values.shape[1], values.shape[3], keys.dtype), []
        ).append(index)
    found: list[Planes] = []
    for (heads, width, value_heads, value_width, dtype), layers in alike.items():
        if (heads, width) == (value_heads, value_width):
            found.append(Planes(None, tuple(layers), heads, width, dtype))
        else:
            found.append(Planes(0, tuple(layers), heads, width, dtype))
            found.append(Planes(1, tuple(layers), value_heads, value_width, dtype))
    return tuple(found)


def key_space(
    model: PreTrainedModel,
    layout: Iterable[Planes],
    *,
    chunk_tokens: int,
    weights: Weights | None = None,
    tenant: str = "",
    fidelity: str = "exact",
    tags_in_key: tuple[tuple[str, str], ...] = (),
) -> KeySpace:
    """Name everything that shapes the KV of this very model object.

    Raises:
        ConfigError: weights that cannot be read, or a rotary embedding whose prefix is not fixed.
    """
    groups = tuple(planes.group(chunk_tokens) for planes in layout)
    return KeySpace(
        format=FORMAT,
        model=type(model).__name__,
        weights=(weights or Weights()).digest(model),
        epoch=0,
        kv_dtype=groups[0].dtype,
        scales="none",
        rope=ropes(model),
        groups=groups,
        adapter=adapter(model),
        tenant=tenant,
        fidelity=fidelity,
        tags_in_key=tags_in_key,
        fields=(("transformers.config", config_digest(model)),),
    )


class Weights:
    """Digests of the tensors of one model, remembered until they change."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[torch.Tensor, int, int, bytes]] = {}

    def digest(self, model: PreTrainedModel) -> bytes:
        """Fingerprint of all parameters and buffers but those of low-rank adapters: names, types, shapes, bytes."""
        state = hashlib.sha256(b"lmcache.live-weights\x00")
        for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
            if "lora_" not in name:
                state.update(self._described(name, tensor))
        return state.digest()

    def _described(self, name: str, tensor: torch.Tensor) -> bytes:
        # The tensor itself is kept, so that no other one can get its identity.
        seen = (tensor, tensor.data_ptr(), tensor._version)
        known = self._known.get(name)
        if known is None or known[0] is not seen[0] or known[1:3] != seen[1:]:
            known = self._known[name] = (*seen, described(name, tensor.detach()))
        return known[3]


def adapter(model: PreTrainedModel) -> Adapter | None:
    """Digest and scale of the adapters that are switched on, or None."""
    state = hashlib.sha256(b"lmcache.live-adapter\x00")
    scales: list[float] = []
    for name, module in _tuned(model.named_modules()):
        for chosen in module.active_adapters:
            scaling = getattr(module, "scaling", None)
            scales.append(float(scaling.get(chosen, 0.0)) if isinstance(scaling, dict) else 1.0)
            state.update(struct.pack("<d", scales[-1]))
            for part, tensor in module.named_parameters():
                if chosen in part.split("."):
                    state.update(described(f"{name}.{part}", tensor.detach()))
    return Adapter(digest=state.digest(), scale=max(scales)) if scales else None


def ropes(model: PreTrainedModel) -> tuple[Rope, ...]:
    """Rotary embeddings as the model resolved them."""
    found = []
    for name, module in model.named_modules():
        frequencies = getattr(module, "inv_freq", None)
        if not isinstance(frequencies, torch.Tensor):
            continue
        kind = str(getattr(module, "rope_type", "default"))
        if kind in LENGTH_DEPENDENT:
            raise ConfigError(
                f"{name} of {type(model).__name__} uses {kind} rotary embeddings: the KV of a prefix depends "
                "on the length of the prompt and cannot be reused"
            )
        found.append(
            Rope(
                layers=(),
                kind=f"{name}:{kind}",
                base=0.0,
                rotary_dim=2 * frequencies.numel(),
                interleaved=False,
                parameters=(
                    ("inv_freq", tuple(frequencies.double().flatten().tolist())),
                    ("scaling", float(getattr(module, "attention_scaling", 1.0))),
                ),
            )
        )
    return tuple(found)


def config_digest(model: PreTrainedModel) -> str:
    """Digest of the configuration without names and generation settings."""

    def stable(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): stable(v) for k, v in value.items() if k not in VOLATILE}
        return value

    text = json.dumps(stable(model.config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def versions(model: PreTrainedModel) -> tuple[Any, ...]:
    """A value that differs after any change of the weights in place or of the active adapters; cheap."""
    modules = list(model.named_modules())  # once: walking costs more than all the rest
    return (
        tuple(
            (id(tensor), tensor.data_ptr(), tensor._version)
            for _, module in modules
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        ),
        tuple(
            (name, tuple(module.active_adapters), str(getattr(module, "scaling", "")))
            for name, module in _tuned(modules)
        ),
    )


def _tuned(modules: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Those with an adapter that is switched on and not merged into their weights."""
    return [
        (name, module)
        for name, module in modules
        if isinstance(getattr(module, "active_adapters", None), list)
        and hasattr(module, "disable_adapters")
        and not module.disable_adapters
        and not getattr(module, "merged", False)
    ]


def described(name: str, tensor: torch.Tensor) -> bytes:
    """Name, type, shape and digest of all bytes of a tensor.

    Raises:
        ConfigError: it is not loaded.
    """
    if tensor.device.type == "meta":
        raise ConfigError(f"weights of {name} are not loaded (meta device)")
    head = f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode()
    held = tensor.cpu().contiguous()
    nbytes = held.numel() * held.element_size()
    view = memoryview((ctypes.c_char * nbytes).from_address(held.data_ptr())) if nbytes else b""
    return struct.pack("<I", len(head)) + head + ops.digest(memoryview(view).cast("B"), 0)
