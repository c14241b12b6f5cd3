"""Page specs read off tensors: addresses, shapes and strides, never formulas.

Works on anything that offers ``data_ptr()``, ``shape``, ``stride()`` and ``element_size()``; no tensor
library is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from lmcache_core.spi import Interior, PageSpec


class TensorLike(Protocol):
    """What is asked of a tensor."""

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
