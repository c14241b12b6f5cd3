"""What the scheduler's half of the connector tells the workers, once per engine step.

These records travel inside vLLM's own scheduler output and are pickled there; they hold plain values only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lmcache_core.wire.client import Handle

Tables = tuple[tuple[int, ...], ...]
"""Block ids of one request, per cached group, from its first token on."""


@dataclass(frozen=True, slots=True)
class Load:
    """Fill blocks from the cache.

    Attributes:
        id: the request.
        handle: leases that belong to the ranks now; None: they are lost, and the blocks have failed.
        spots: first token of the chunk of each leased value.
        first, end: token positions to fill, whole blocks.
        total: tokens of the request, for people.
        tables: where.
        background: the request waits for the load; no forward pass does.
    """

    id: str
    handle: Handle | None
    spots: tuple[int, ...]
    first: int
    end: int
    total: int
    tables: Tables
    background: bool = False


@dataclass(frozen=True, slots=True)
class Store:
    """Keep full chunks that are computed when this step is.

    Attributes:
        digests: of neighbouring chunks, the first of which begins at token ``first``.
        base: tokens before it were not computed by this request since it was admitted.
        tables: up to the end of the last chunk.
        total: tokens of the request so far, for people.
        last: the request's prompt is complete with it.
        tokens, parent: their ids, and the digest of the chunk before, where vLLM publishes events.
        lora: number and name of the request's adapter there.
    """

    id: str
    digests: tuple[bytes, ...]
    first: int
    base: int
    tables: Tables
    tenant: str = ""
    tags: tuple[str, ...] = ()
    total: int = 0
    last: bool = False
    tokens: tuple[int, ...] = ()
    parent: bytes | None = None
    lora: tuple[int | None, str | None] = (None, None)


@dataclass(slots=True)
class Step:
    """Everything of one engine step; mostly empty.

    Attributes:
        turn: counts steps, for ranks that fill a chunk together.
        checks: what was computed although the cache has it, to be compared.
    """

    turn: int = 0
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    checks: list[Load] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Announced:
    """A chunk has become visible: the fields of vLLM's ``BlockStored``."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str = "CPU"
    lora_name: str | None = None
