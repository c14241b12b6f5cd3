"""How key/value memory looks, described by numbers read off the engine, never by an enumeration of formats.

No tensor library is involved: addresses and strides are plain integers, in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol


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


class TensorLike(Protocol):
    """What is asked of a tensor to read its layout off; no tensor library is imported."""

    @property
    def shape(self) -> Sequence[int]: ...
    def data_ptr(self) -> int: ...
    def stride(self) -> Any: ...
    def element_size(self) -> int: ...


def page_spec(
    tensor: TensorLike,
    axes: str,
    *,
    layer: int,
    group: int = 0,
    plane: int = 0,
    content: tuple[int, int] | None = None,
    interior: Interior = Interior.ROWS,
) -> PageSpec:
    """Describe one plane.

    Args:
        axes: one letter per dimension, outermost first: ``b`` block, ``n`` token slot, ``h`` head, ``c``
            content. ``c`` is required and contiguous; an absent axis has length 1.
        content: element range [begin, end) of ``c`` that is this plane (keys and values side by side in
            one cell are two planes).

    Raises:
        ValueError: axes and tensor do not fit, or the content of a cell is not contiguous.
    """
    shape, stride, item = tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()
    if len(axes) != len(shape) or len(set(axes)) != len(axes) or not set(axes) <= set("bnhc"):
        raise ValueError(f"axes {axes!r} do not name the dimensions of a tensor of shape {shape}")
    size = dict(zip(axes, shape, strict=True))
    step = dict(zip(axes, stride, strict=True))
    if "c" not in size or (step["c"] != 1 and size["c"] > 1):
        raise ValueError(
            f"cells of a tensor with axes {axes!r} and strides {stride} are not contiguous"
        )
    begin, end = content or (0, size["c"])
    if not 0 <= begin < end <= size["c"]:
        raise ValueError(f"content {begin}:{end} is outside a cell of {size['c']} elements")
    return PageSpec(
        layer=layer,
        plane=plane,
        group=group,
        pointer=tensor.data_ptr() + begin * item,
        blocks=size.get("b", 1),
        heads=size.get("h", 1),
        states=size.get("n", 1),
        cell_bytes=(end - begin) * item,
        block_stride=step.get("b", 0) * item,
        state_stride=step.get("n", 0) * item,
        head_stride=step.get("h", 0) * item,
        interior=interior,
    )
