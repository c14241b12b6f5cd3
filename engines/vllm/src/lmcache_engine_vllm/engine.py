"""What is asked of vLLM itself, in one place: it moves between releases."""

from __future__ import annotations

import hashlib
from importlib import import_module
from typing import Any

from lmcache_core.spi import ConfigError
from lmcache_engine_vllm.layout import Ranks


def release() -> str:
    """Version of the engine."""
    # Here and by name: the rest of this package is tested without it.
    return str(import_module("vllm").__version__)


def refuse(config: Any) -> None:
    """Raises:
    ConfigError: the engine is spread in a way that this connector does not follow.
    """
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(
                f"{name} spreads the tokens of one block over ranks, which is not supported"
            )
    alone = getattr(parallel, "data_parallel_size", 1) == 1
    hosts = getattr(parallel, "nnodes_within_dp", getattr(parallel, "nnodes", 1) if alone else 1)
    if hosts > 1:
        raise ConfigError("an engine that spans hosts has no one daemon for all of its ranks")


def departures(gone: list[bytes], lost: bool) -> list[Any]:
    """What vLLM publishes of chunks that are in no tier any more, and of a cache of which nothing is known."""
    if not (gone or lost):
        return []
    kinds = import_module("vllm.distributed.kv_events")
    removed = [kinds.BlockRemoved(block_hashes=gone, medium="CPU")] if gone else []
    return [*([kinds.AllBlocksCleared()] if lost else []), *removed]


def ranks(config: Any, cache: Any) -> Ranks:
    """Where this worker stands."""
    parallel, model = config.parallel_config, config.model_config
    tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    replicas = int(getattr(cache, "kv_tp_replicas", 1) or 1)
    if getattr(model, "use_mla", False):
        replicas = tensor
    stages: tuple[tuple[int, int], ...] = ()
    if pipeline > 1:
        cut = import_module("vllm.distributed.utils").get_pp_indices
        layers = model.get_total_num_hidden_layers()
        stages = tuple(cut(layers, stage, pipeline) for stage in range(pipeline))
    return Ranks(parallel.rank, tensor, pipeline, replicas, stages)


def backends(config: Any, names: list[str]) -> dict[str, str]:
    """Attention backend of each layer, with what else decides how the inside of its blocks looks."""
    layers = getattr(config.compilation_config, "static_forward_context", {})
    found = {}
    for name in names:
        layer = layers.get(name)
        named = getattr(getattr(layer, "attn_backend", None), "get_name", None)
        text = str(named()) if named is not None else "unknown"
        if text.startswith("CPU_ATTN"):
            text = f"{text}:{_cpu_packing(layer)}"
        found[name] = text
    return found


def _cpu_packing(layer: Any) -> str:
    """The instruction set decides how the CPU backend packs keys; unknown: this very processor."""
    packing = getattr(layer, "isa", None)
    if packing:
        return str(packing)
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(flags.encode()).hexdigest()[:16]
