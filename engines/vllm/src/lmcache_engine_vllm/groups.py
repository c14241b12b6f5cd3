"""Which KV cache groups of an engine are kept, by which rule, and in which blocks they lie.

Nothing of vLLM is imported: its records are told apart by the names of their classes, so that a new subclass of
a known one is treated like it and an unknown one is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_core.identity import chunk_tokens
from lmcache_core.spi import ConfigError, Reuse
from lmcache_engine_vllm.steps import Tables

STATE = ("mamba_type", "shapes", "dtypes", "tp_replicated")
"""What tells apart recurrent states of one size."""


@dataclass(frozen=True, slots=True)
class Part:
    """One KV cache group that is kept.

    Attributes:
        index: its number at the engine.
        block: tokens of one block of its table.
        layers: names of its layers.
        state: what a recurrent state consists of; empty for everything else.
    """

    index: int
    block: int
    reuse: Reuse
    window: int
    layers: tuple[str, ...]
    state: str = ""


def parts(cache: Any) -> tuple[Part, ...]:
    """The groups of an engine's ``KVCacheConfig`` that a prefix hit needs.

    Raises:
        ConfigError: one of them follows a rule that is not known here.
    """
    chosen = getattr(cache, "prefix_cacheable_group_ids", range(len(cache.kv_cache_groups)))
    found = []
    for group in cache.kv_cache_groups:
        # Whatever the engine thinks of its reuse: without its state a prefix is not what it was.
        if _recurrent(group.kv_cache_spec):
            _check_state(group.kv_cache_spec)
    for index in chosen:
        group = cache.kv_cache_groups[index]
        spec = group.kv_cache_spec
        reuse, window = _rule(spec)
        state = ",".join(f"{name}={getattr(spec, name, None)}" for name in STATE)
        found.append(
            Part(
                index, int(spec.block_size), reuse, window, tuple(group.layer_names),
                state if reuse is Reuse.POINT else "",
            )
        )  # fmt: skip
    if not found:
        raise ConfigError("this model has no KV cache group that could be reused")
    return tuple(found)


def chunk_of(cache_parts: Sequence[Part], configured: int) -> int:
    """Tokens per chunk: whole blocks of every group."""
    return chunk_tokens(configured, [part.block for part in cache_parts])


def _recurrent(spec: Any) -> bool:
    inner = getattr(spec, "kv_cache_specs", None) or {"": spec}
    return any("Mamba" in base.__name__ for each in inner.values() for base in type(each).__mro__)


def _check_state(spec: Any) -> None:
    for each in (getattr(spec, "kv_cache_specs", None) or {"": spec}).values():
        if getattr(each, "mamba_cache_mode", "none") != "align":
            raise ConfigError(
                "a recurrent state is kept at ends of blocks, and only with prefix caching "
                "(--enable-prefix-caching) does this engine have one there"
            )
        if getattr(each, "num_speculative_blocks", 0):
            raise ConfigError("recurrent states under speculative decoding are not kept")


def _rule(spec: Any) -> tuple[Reuse, int]:
    inner = getattr(spec, "kv_cache_specs", None)
    if inner:
        rules = {_rule(each) for each in inner.values()}
        if len(rules) == 1:
            return rules.pop()
        raise ConfigError("layers of one KV cache group are reused by different rules")
    names = {base.__name__ for base in type(spec).__mro__}
    if "SlidingWindowSpec" in names:
        return Reuse.WINDOW, int(spec.sliding_window)
    if "FullAttentionSpec" in names:
        return Reuse.ALL, 0
    if "MambaSpec" in names:
        return Reuse.POINT, 0
    raise ConfigError(f"KV cache groups of {type(spec).__name__} are not known here")


def tables(parts: Sequence[Part], out: Any, id: str, end: int | None = None) -> Tables:
    """Block tables of a request in this step, up to a token."""
    found = out.kv_connector_block_state.get_block_ids(id) or ()
    return tuple(
        tuple(found[part.index] if end is None else found[part.index][: -(-end // part.block)])
        for part in parts
    )


def filled(parts: Sequence[Part], out: Any, id: str, end: int) -> Tables:
    """The same; of recurrent states only those that the engine says are whole after this step."""
    offers = getattr(out.kv_connector_block_state, "boundary_state_offloads", None) or {}
    found = []
    for part, table in zip(parts, tables(parts, out, id, end), strict=True):
        if part.reuse is Reuse.POINT:
            whole = {upto: block for n, block, upto in offers.get(id, ()) if n == part.index}
            table = tuple(whole.get(upto, 0) for upto in range(part.block, end + 1, part.block))
        found.append(table)
    return tuple(found)
