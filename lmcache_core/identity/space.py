"""What a stored chunk is valid for: everything that is constant for all tokens of a request."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from lmcache_core.identity.canonical import Scalar, Unkeyable, canonical, check_types, pairs
from lmcache_core.spi.keys import KeyManager
from lmcache_core.spi.layout import Interior, Reuse

FORMAT = 1
"""Version of the stored form; a new one makes every older value a stranger."""
SPACE_TAG = b"lmcache.space\x00"
ROOT_TAG = b"lmcache.root\x00"
EXACT = "exact"
APPROXIMATE = "approx:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding as *resolved* by the engine (LongRoPE chooses at run time).

    Attributes:
        layers: layers it applies to, ascending; empty means all.
        kind: name of the rule, such as ``"default"``, ``"yarn"``, ``"longrope-short"``.
        base: theta.
        rotary_dim: rotated elements of a head.
        interleaved: pairs are neighbours (GPT-J) rather than halves (NeoX).
        parameters: every further number the rule used (factors, attention scale ...), by name.
    """

    layers: tuple[int, ...]
    kind: str
    base: float
    rotary_dim: int
    interleaved: bool
    parameters: tuple[tuple[str, Scalar | tuple[float, ...]], ...]

    def __post_init__(self) -> None:
        check_types(self)
        ordered = tuple(sorted(self.parameters, key=lambda item: item[0]))
        object.__setattr__(self, "parameters", ordered)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers whose KV is stored together, under one key per chunk.

    Attributes:
        reuse: which chunks a prefix hit needs.
        window: tokens of a ``WINDOW`` group, else 0.
        tokens_per_chunk: tokens stored under one key.
        layers: transformer layers stored here, ascending.
        heads: KV heads of the whole model (1 for latent attention, 0 where heads do not apply).
        head_range: heads [begin, end) stored on this node; (0, heads) unless an engine spans nodes.
        head_dim: elements of one head in one plane (0 when opaque).
        planes: 2 for keys and values, 1 for latent or opaque content.
        dtype: element type name (``"bfloat16"``).
        interior: what may be done inside a block.
        page_size, encoding, engine: tokens of a block, exact encoding id and engine tag of a
            ``PAGE`` or ``STATE`` group; None for ``ROWS``: its stored form is shared by engines.
    """

    reuse: Reuse
    window: int
    tokens_per_chunk: int
    layers: tuple[int, ...]
    heads: int
    head_range: tuple[int, int]
    head_dim: int
    planes: int
    dtype: str
    interior: Interior
    page_size: int | None
    encoding: str | None
    engine: str | None

    def __post_init__(self) -> None:
        check_types(self)
        opaque = self.interior is not Interior.ROWS
        own = (self.page_size, self.encoding, self.engine)
        if any((value is None) is opaque for value in own):
            rule = "names" if opaque else "does not name"
            raise Unkeyable(
                f"a {self.interior.value} group {rule} page size, encoding and engine; got {own}"
            )
        if (self.window > 0) is not (self.reuse is Reuse.WINDOW) or self.window < 0:
            raise Unkeyable(f"window {self.window} does not go with reuse rule {self.reuse.value}")
        begin, end = self.head_range
        if self.tokens_per_chunk < 1 or self.planes < 1 or not 0 <= begin <= end <= self.heads:
            raise Unkeyable(
                f"impossible group: {self.tokens_per_chunk} tokens per chunk, "
                f"{self.planes} planes, heads {self.head_range} of {self.heads}"
            )
        if not self.layers or list(self.layers) != sorted({*self.layers}):
            raise Unkeyable(f"layers of a group are ascending and at least one, got {self.layers}")
        if opaque and self.tokens_per_chunk % (self.page_size or 1):
            raise Unkeyable(
                f"{self.tokens_per_chunk} tokens per chunk are no multiple of "
                f"page size {self.page_size}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A low-rank adapter by content: a name or a path may be filled anew.

    Attributes:
        digest: 32 bytes over the adapter's own tensors and configuration.
        scale: scaling applied at run time.
    """

    digest: bytes
    scale: float

    def __post_init__(self) -> None:
        check_types(self)
        _exactly(32, "adapter digest", self.digest)


@dataclass(frozen=True, kw_only=True)  # no slots: the two digests are cached in __dict__
class KeySpace:
    """Everything that changes the KV of all positions. Every field is required: nothing is assumed.

    Attributes:
        format: ``FORMAT``.
        model: model name, for people; the weights decide.
        weights: 32 bytes, see ``weights_fingerprint``.
        epoch: raised by every change of weights in place.
        kv_dtype: precision of the cache as the engine names it after resolving ``auto``.
        scales: origin of quantisation scales: ``"none"``, ``"checkpoint"``, ``"runtime:<digest>"``.
        rope: resolved rotary embeddings; empty when the model has none.
        groups: the layout; ``Key.group`` is an index into it.
        adapter: None for the base model.
        tenant: salt; ``""`` is the shared tenant, said explicitly. Not part of ``repr``.
        fidelity: ``"exact"`` or ``"approx:<policy>"``; fixed per engine instance.
        tags_in_key: request tags that configuration makes part of identity.
        fields: tagged fields added by key managers.

    Raises:
        Unkeyable: a field of the wrong type or an impossible value.
    """

    format: int
    model: str
    weights: bytes
    epoch: int
    kv_dtype: str
    scales: str
    rope: tuple[Rope, ...]
    groups: tuple[Group, ...]
    adapter: Adapter | None
    tenant: str = field(repr=False)
    fidelity: str
    tags_in_key: tuple[tuple[str, str], ...]
    fields: tuple[tuple[str, Scalar], ...]

    def __post_init__(self) -> None:
        check_types(self)
        _exactly(32, "weights fingerprint", self.weights)
        if self.fidelity != EXACT and (
            not self.fidelity.startswith(APPROXIMATE) or self.fidelity == APPROXIMATE
        ):
            raise Unkeyable(
                f"fidelity is {EXACT!r} or '{APPROXIMATE}<policy>', not {self.fidelity!r}"
            )
        if not 1 <= len(self.groups) <= 1 << 16:
            raise Unkeyable(f"a key space has 1 to 65536 groups, got {len(self.groups)}")
        object.__setattr__(self, "tags_in_key", pairs("tags_in_key", self.tags_in_key))
        object.__setattr__(self, "fields", pairs("fields", self.fields))

    @cached_property
    def digest(self) -> bytes:
        """32 bytes: ``Key.space``."""
        return hashlib.sha256(SPACE_TAG + canonical(self)).digest()

    @cached_property
    def root(self) -> bytes:
        """32 bytes: start of every chain of chunk digests in this space."""
        return hashlib.sha256(ROOT_TAG + canonical(self)).digest()

    @property
    def readable(self) -> tuple[KeySpace, ...]:
        """Spaces an engine of this fidelity may read, in order; it writes only to the last of them.

        Exact chunks serve everybody; an approximate chunk, or one computed on top of it, never
        serves an engine that was promised exactness.
        """
        return (self,) if self.fidelity == EXACT else (replace(self, fidelity=EXACT), self)


def chunk_tokens(configured: int, block_sizes: Iterable[int] = ()) -> int:
    """Smallest legal chunk of at least ``configured`` tokens.

    Args:
        block_sizes: block sizes of the ``PAGE`` and ``STATE`` groups; a chunk holds whole blocks of
            each.
    """
    unit = math.lcm(*block_sizes)
    return -(-configured // unit) * unit


def with_manager(
    space: KeySpace, name: str, manager: KeyManager, labels: Mapping[str, str]
) -> KeySpace:
    """Key space of one request: ``space`` with the fields of the key manager called ``name`` added.

    They lie under that name: two requests that differ without the manager still differ with it.
    """
    added = tuple((f"{name}.{field}", value) for field, value in manager.fields(labels).items())
    return replace(space, fields=space.fields + added) if added else space


def _exactly(nbytes: int, name: str, value: bytes) -> None:
    if len(value) != nbytes:
        raise Unkeyable(f"{name} has {len(value)} bytes, expected {nbytes}")
