"""What names the KV of an engine, and of one request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lmcache_core.config import EngineConfig
from lmcache_core.frame import TAGS_LIMIT
from lmcache_core.identity import (
    FORMAT,
    Extra,
    Group,
    KeyManager,
    KeySpace,
    Scalar,
    Unkeyable,
    canonical,
    weights_fingerprint,
)
from lmcache_core.spi import ConfigError

VOLATILE = {
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id",
    "output_attentions", "output_hidden_states", "pad_token_id", "return_dict", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip
"""Configuration of a model that does not change the KV of a prefix."""
TAG = "lmcache.tag."


def key_space(config: Any, groups: Sequence[Group], sharding: str, fidelity: str) -> KeySpace:
    """Key space of an engine with vLLM's ``VllmConfig``.

    Args:
        sharding: how chunks are cut among ranks; another cut is another space.

    Raises:
        ConfigError: weights that are not on disk, or tiers that drop tokens.
    """
    if any(name.startswith("drop") for name in fidelity.removeprefix("approx:").split("+")):
        raise ConfigError(
            f"a tier drops tokens ({fidelity}), and a page holds a row for every position in all layers: "
            "take serde drop out of the daemon's tiers (quant stays), or use the transformers engine"
        )
    model, cache = config.model_config, config.cache_config
    kv_dtype = str(getattr(cache, "cache_dtype", "auto"))
    drafting = getattr(config, "speculative_config", None)
    draft = getattr(drafting, "draft_model_config", None) if drafting is not None else None
    scales = "none"
    if kv_dtype.startswith("fp8"):
        scales = "checkpoint"
        if getattr(cache, "calculate_kv_scales", False):
            raise ConfigError(
                "KV scales that are calibrated at run time differ between engines; "
                "set calculate_kv_scales to false to use a cache"
            )
    fields: dict[str, Scalar] = {
        "vllm.config": _config_digest(model.hf_config),
        "vllm.dtype": str(model.dtype),
        "vllm.quantization": str(getattr(model, "quantization", None)),
        "vllm.sharding": sharding,
        "vllm.draft": weights_of(draft, config).hex() if draft is not None else "",
        "vllm.max_len": _length_rule(model),
    }
    return KeySpace(
        format=FORMAT,
        model=(getattr(model.hf_config, "architectures", None) or ["unknown"])[0],
        weights=weights_of(model, config),
        epoch=0,
        kv_dtype=groups[0].dtype if kv_dtype == "auto" else kv_dtype,
        scales=scales,
        rope=(),
        groups=tuple(groups),
        adapter=None,
        tenant="",
        fidelity=fidelity,
        tags_in_key=(),
        fields=tuple(fields.items()),
    )


def weights_of(model: Any, config: Any) -> bytes:
    """Fingerprint of the weights that an engine loads.

    Raises:
        ConfigError: they are nowhere on disk.
    """
    load_format = getattr(getattr(config, "load_config", None), "load_format", "auto")
    if load_format == "dummy":
        said = f"dummy:{getattr(model, 'seed', 0)}:{_config_digest(model.hf_config)}"
        return hashlib.sha256(said.encode()).digest()
    path = Path(model.model)
    if not path.exists():
        path = _downloaded(model.model, getattr(model, "revision", None))
    try:
        return weights_fingerprint(path if path.is_dir() else path.parent)
    except OSError as error:
        raise ConfigError(f"weights of {model.model} cannot be named: {error}") from error


@dataclass(frozen=True, slots=True)
class Wishes:
    """What one request wants of the cache, and what shapes its KV besides token ids.

    Attributes:
        extras: in the chain of its chunks.
        tenant: salt.
        tags: labels of what is stored.
        skip_save: keep nothing of it.
        most: tokens kept at most.
        lora: number and name of its adapter, for whoever follows events; not part of any key.
    """

    extras: tuple[Extra, ...] = ()
    tenant: str = ""
    tags: tuple[str, ...] = ()
    skip_save: bool = False
    most: int | None = None
    lora: tuple[int | None, str | None] = (None, None)


def wishes(request: Any, options: EngineConfig, managers: Mapping[str, KeyManager]) -> Wishes:
    """Read vLLM's ``Request``.

    Raises:
        Unkeyable: an input no key can name, or a wish nobody can follow; the request runs without the cache.
    """
    try:
        return _wishes(request, options, managers)
    except (AttributeError, ArithmeticError, TypeError, ValueError) as error:
        raise Unkeyable(f"{type(error).__name__}: {error}") from error


def _wishes(request: Any, options: EngineConfig, managers: Mapping[str, KeyManager]) -> Wishes:
    if getattr(request, "prompt_embeds", None) is not None:
        raise Unkeyable("prompt embeddings")
    if getattr(request, "resumable", False):
        raise Unkeyable("a session whose tokens may be replaced")
    params = getattr(request, "kv_transfer_params", None) or {}
    given = {k.removeprefix(TAG): str(v) for k, v in params.items() if k.startswith(TAG)}
    tags = tuple(f"{name}={value}" for name, value in given.items())
    if len(tags) > TAGS_LIMIT or any(len(tag.encode()) > 255 for tag in tags):
        raise Unkeyable(f"a request has up to {TAGS_LIMIT} tags of at most 255 bytes")
    extras = [_media(feature) for feature in getattr(request, "mm_features", None) or ()]
    if (lora := getattr(request, "lora_request", None)) is not None:
        extras.append(Extra("adapter", _adapter(str(lora.lora_path)), 0, 0))
    salt = getattr(request, "cache_salt", None) or ""
    if salt:
        extras.append(Extra("salt", _digest(salt), 0, 0))
    named = sorted((name, given[name]) for name in options.tags_in_key if name in given)
    added = [
        (f"{name}.{field}", value)
        for name, manager in sorted(managers.items())
        for field, value in sorted(manager.fields(given).items())
    ]
    for kind, pairs in (("tag", named), ("field", added)):
        if pairs:
            digest = hashlib.sha256(canonical(tuple(canonical(pair) for pair in pairs))).digest()
            extras.append(Extra(kind, digest, 0, 0))
    most = params.get("lmcache.max_offload_tokens")
    return Wishes(
        tuple(extras),
        salt if len(salt.encode()) < 256 else _digest(salt).hex(),
        tags,
        bool(params.get("lmcache.skip_save", False)),
        int(most) if isinstance(most, int | float) else None,
        (getattr(lora, "lora_int_id", None), getattr(lora, "lora_name", None)),
    )


def _media(feature: Any) -> Extra:
    where = feature.mm_position
    # Any placeholder range may be sparse; the positions inside are the same for the same identifier.
    return Extra(
        "media", _digest(str(feature.identifier)), where.offset, where.offset + where.length
    )


@lru_cache(256)
def _adapter_of(path: str, stamp: tuple[tuple[str, int, int], ...]) -> bytes:
    folder = Path(path)
    state = hashlib.sha256(weights_fingerprint(folder))
    for name in ("adapter_config.json", "new_embeddings.safetensors"):
        if (folder / name).is_file():
            state.update((folder / name).read_bytes())
    return state.digest()


def _adapter(path: str) -> bytes:
    try:
        stamp = tuple(
            (each.name, (found := each.stat()).st_size, found.st_mtime_ns)
            for each in sorted(Path(path).iterdir())
        )
        return _adapter_of(path, stamp)
    except OSError as error:
        raise Unkeyable(f"adapter at {path}: {error}") from error


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _config_digest(config: Any) -> str:
    def stable(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): stable(v) for k, v in value.items() if k not in VOLATILE}
        return value

    said = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    text = json.dumps(stable(said), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _length_rule(model: Any) -> int:
    """The longest sequence, where the rotation of every position depends on it."""
    config = getattr(model, "hf_text_config", model.hf_config)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = json.dumps(rope, default=str)
    return int(model.max_model_len) if "longrope" in kinds or "dynamic" in kinds else 0


def _downloaded(name: str, revision: str | None) -> Path:
    """Folder of a model that was fetched by name."""
    try:
        from huggingface_hub import snapshot_download  # here: only models by name need it

        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(f"the folder of model {name!r} is not found: {error}") from error
