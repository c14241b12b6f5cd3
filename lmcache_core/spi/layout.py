"""How key/value memory looks, described by numbers read off the engine, never by an enumeration of formats.

No tensor library is involved: addresses and strides are plain integers, in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Interior(Enum):
    """What may be done with the inside of a block."""

    ROWS = "rows"
    """A (token, head) cell means the same at any slot: token-granular copies, codecs and re-sharding are legal."""
    PAGE = "page"
    """Only whole blocks are meaningful (packed or transposed inside)."""
    STATE = "state"
    """One recurrent state per block, valid only where the engine says so."""


class Reuse(Enum):
    """Which stored chunks of a group a prefix hit needs."""

    ALL = "all"
    """Every chunk from the start (full attention)."""
    WINDOW = "window"
    """The chunks covering the last ``window`` tokens before the hit end (sliding window)."""
    POINT = "point"
    """Exactly the state at the hit end (recurrent)."""


@dataclass(frozen=True, slots=True)
class PageSpec:
    """One plane of one layer of a paged cache, as registered by an engine.

    The cell of (block b, state s, head h) starts at
    ``pointer + b*block_stride + s*state_stride + h*head_stride`` and is ``cell_bytes`` long.

    Attributes:
        layer: transformer layer, counted from 0 over the whole model.
        plane: 0 for keys (or the only plane), 1 for values.
        group: layout group the layer belongs to.
        pointer: address of block 0 in this process.
        blocks: number of blocks that may be addressed.
        heads: heads held by this process.
        states: token slots per block (1 for ``Interior.STATE``).
        cell_bytes: bytes of one (head, state) cell.
        block_stride, state_stride, head_stride: distances in bytes.
        interior: what may be done inside a block.
    """

    layer: int
    plane: int
    group: int
    pointer: int
    blocks: int
    heads: int
    states: int
    cell_bytes: int
    block_stride: int
    state_stride: int
    head_stride: int
    interior: Interior = Interior.PAGE

    @property
    def block_nbytes(self) -> int:
        """Content bytes of one block of this plane (padding excluded)."""
        return self.heads * self.states * self.cell_bytes


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """One separately verifiable part of a chunk's payload: the content of one layer for a head range.

    Attributes:
        layer: transformer layer.
        head_begin, head_end: head range out of the model's KV heads (0, 0 when heads do not apply).
        nbytes: bytes of this segment in the payload.
    """

    layer: int
    head_begin: int
    head_end: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Stored form of one chunk of one group, before any serde: segments back to back.

    A segment of a ``ROWS`` group is ``[plane][token][head][dim]`` of ``dtype`` elements.

    Attributes:
        dtype: element type name as torch prints it without the prefix (``"bfloat16"``), or ``"uint8"``.
        tokens: tokens in the chunk.
        planes: 2 for separate keys and values, 1 for latent or opaque content.
        heads: KV heads of the whole model that this node stores.
        head_dim: elements of one head in one plane (0 when the content is opaque).
        interior: what may be done with the content.
        segments: in payload order.
    """

    dtype: str
    tokens: int
    planes: int
    heads: int
    head_dim: int
    interior: Interior
    segments: tuple[SegmentSpec, ...]

    @property
    def nbytes(self) -> int:
        """Payload length in bytes."""
        return sum(segment.nbytes for segment in self.segments)
