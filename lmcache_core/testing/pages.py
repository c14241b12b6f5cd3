"""Paged engine memory for tests, in every physical order, and the plain walk over its cells."""

from __future__ import annotations

import ctypes
import itertools
import os
from array import array
from dataclasses import dataclass

from hypothesis import strategies as st

from lmcache_core.spi.layout import Interior, PageSpec

ORDERS = ("LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""The physical orders of vLLM: layer, block, head, token (N) and content, outermost first."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Paged engine memory in one buffer, filled with noise, and the planes that describe it."""

    memory: memoryview
    specs: tuple[PageSpec, ...]

    def cells(self, ids: array[int], first: int, count: int) -> list[tuple[int, int]]:
        """(offset in ``memory``, length) of all cells of the selection, in payload order."""
        found = []
        for spec in self.specs:
            rows, size = spec.interior is Interior.ROWS, spec.states
            if rows:
                walk = [
                    (t // size, t % size, h)
                    for t in range(first, first + count)
                    for h in range(spec.heads)
                ]
            else:
                blocks = range(first // size, (first + count) // size)
                walk = [(b, n, h) for b in blocks for h in range(spec.heads) for n in range(size)]
            base = spec.pointer - address_of(self.memory)
            for b, n, h in walk:
                at = (
                    base + ids[b] * spec.block_stride + n * spec.state_stride + h * spec.head_stride
                )
                found.append((at, spec.cell_bytes))
        return found


def address_of(view: memoryview) -> int:
    """Address of the first byte of a writable view."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def make_pages(
    order: str,
    *,
    layers: int = 2,
    blocks: int = 4,
    heads: int = 2,
    states: int = 4,
    cell: int = 64,
    planes: int = 2,
    padding: int = 0,
    interior: Interior = Interior.ROWS,
) -> Pages:
    """Memory in one of ``ORDERS``; ``planes`` cells (keys, values) lie side by side in C, and every
    step along B is ``padding`` bytes longer than its content."""
    sizes = {"L": layers, "B": blocks, "H": heads, "N": states, "C": planes * cell}
    strides, total = {"C": 1}, sizes["C"]
    for axis in reversed(order[:-1]):
        total += padding if axis == "B" else 0
        strides[axis] = total
        total *= sizes[axis]
    memory = memoryview(bytearray(os.urandom(total + 64)))
    start = address_of(memory) + -address_of(memory) % 64
    specs = (
        PageSpec(
            layer=layer,
            plane=plane,
            group=0,
            pointer=start + layer * strides["L"] + plane * cell,
            blocks=blocks,
            heads=heads,
            states=states,
            cell_bytes=cell,
            block_stride=strides["B"],
            state_stride=strides["N"],
            head_stride=strides["H"],
            interior=interior,
        )
        for layer, plane in itertools.product(range(layers), range(planes))
    )
    return Pages(memory, tuple(specs))


@st.composite
def selections(draw: st.DrawFn) -> tuple[Pages, array[int], int, int, int]:
    """Pages, distinct block ids, first, count, and where in its buffer the payload begins."""
    interior = draw(st.sampled_from(Interior))
    states = 1 if interior is Interior.STATE else draw(st.sampled_from((1, 2, 3, 16)))
    blocks = draw(st.integers(1, 5))
    pages = make_pages(
        draw(st.sampled_from(ORDERS)),
        layers=draw(st.integers(1, 3)),
        blocks=blocks,
        heads=draw(st.integers(1, 3)),
        states=states,
        cell=draw(st.sampled_from((1, 3, 8, 64, 128, 132))),
        planes=draw(st.integers(1, 2)),
        padding=draw(st.sampled_from((0, 1, 64, 192))),
        interior=interior,
    )
    ids = array("q", draw(st.permutations(range(blocks)))[: draw(st.integers(0, blocks))])
    unit = 1 if interior is Interior.ROWS else states
    first = unit * draw(st.integers(0, len(ids) * states // unit))
    count = unit * draw(st.integers(0, (len(ids) * states - first) // unit))
    return pages, ids, first, count, draw(st.sampled_from((0, 1, 3, 32, 64)))


def aligned(nbytes: int, offset: int = 0) -> memoryview:
    """A writable view that begins ``offset`` bytes after a cache line, filled with 0xA5."""
    room = memoryview(bytearray(b"\xa5") * (nbytes + offset + 64))
    start = -address_of(room) % 64 + offset
    return room[start : start + nbytes]
