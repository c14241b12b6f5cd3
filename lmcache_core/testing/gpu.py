"""``GPUConnectorTests``: copies between paged memory and payloads. Provisional, as ``lmcache_core.spi.gpu`` is.

The oracle is ``Pages.cells``: the plain walk over the cells that the page specs name, on bytes. A connector for an
accelerator overrides ``place``, which puts the bytes of a ``Pages`` on the device and says how to read them back.

* G1 Order. ``pack`` yields the cells of the selection in payload order and touches nothing else.
* G2 Inverse. ``unpack`` writes the cells of the selection and not one byte beside them.
* G3 Refusal. A bad selection or a buffer of another length is a ``ValueError``, and nothing was touched.
* G4 Digests. With a seed both directions digest every segment; ``unpack`` names the first that is damaged.
* G5 Layers. ``layers`` restricts payload and copy to the planes of those layers.
* G6 Fences. After ``wait`` the copy is over: ``done`` says so and both sides may be used again.
* G7 Close. ``close`` is idempotent and lets the engine's memory go.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import xxhash

from lmcache_core.spi import Copied, Fence, GPUConnector, Interior, PageSpec
from lmcache_core.testing.laws import Decorator, law, read_laws
from lmcache_core.testing.pages import ORDERS, Pages, make_pages

GPU_LAWS = read_laws(__doc__)
TABLE = (3, 0, 2)
"""Blocks of the sequence under test; block 1 belongs to somebody else."""
SELECTIONS = ((0, 12), (0, 4), (4, 8))
PARTS = ((0, 1), (3, 6), (11, 1), (5, 0))
"""Selections that cut blocks: legal for rows only."""


def gpu_law(number: str) -> Decorator:
    return law(number, GPU_LAWS[number])


@dataclass(frozen=True, slots=True)
class Placed:
    """Paged memory where the connector finds it.

    Attributes:
        tensors: what ``bind`` is given, by layer name.
        specs: what ``bind`` is given; pointers are addresses there.
        read: all bytes there, as they are now.
    """

    tensors: Mapping[str, Any]
    specs: Sequence[PageSpec]
    read: Callable[[], bytes]


class GPUConnectorTests(ABC):
    """Laws G1-G7.

    Attributes:
        orders: physical orders the connector has to master.
        interiors: interiors likewise.
        wait_s: a copy that takes longer fails.
    """

    orders: ClassVar[Sequence[str]] = ORDERS
    interiors: ClassVar[Sequence[Interior]] = tuple(Interior)
    wait_s: ClassVar[float] = 60.0

    @abstractmethod
    def make_connector(self) -> GPUConnector: ...

    def place(self, pages: Pages) -> Placed:
        """Put the bytes of ``pages.memory`` where the connector copies; by default they stay."""
        return Placed({"kv": pages.memory}, pages.specs, pages.memory.tobytes)

    def worlds(self) -> Iterator[tuple[Pages, GPUConnector, Placed]]:
        """Every order and interior, bound to a connector of its own."""
        for interior in self.interiors:
            for number, order in enumerate(self.orders):
                pages = make_pages(
                    order,
                    states=1 if interior is Interior.STATE else 4,
                    cell=(8, 64, 132)[number % 3],
                    planes=1 + number % 2,
                    padding=(0, 64, 192)[number % 3],
                    interior=interior,
                )
                connector, placed = self.make_connector(), self.place(pages)
                connector.bind(placed.tensors, placed.specs)
                yield pages, connector, placed
                connector.close()

    def selections(self, pages: Pages) -> list[tuple[int, int]]:
        spec = pages.specs[0]
        if spec.interior is Interior.STATE:
            return [(0, 3), (1, 1), (2, 0)]
        return [*SELECTIONS, *(PARTS if spec.interior is Interior.ROWS else ())]

    def finish(self, fence: Fence) -> Copied:
        copied = fence.wait(self.wait_s)
        assert copied is not None, f"not over after {self.wait_s} s"
        assert fence.done(), "waited for, yet not done"
        return copied

    @gpu_law("G1")
    def test_pack_yields_the_cells_in_payload_order(self) -> None:
        for pages, connector, placed in self.worlds():
            before = placed.read()
            for first, count in self.selections(pages):
                expected = gathered(pages, before, first, count)
                into = bytearray(len(expected))
                self.finish(connector.pack(0, TABLE, first, count, memoryview(into)))
                assert into == expected, f"{pages.specs[0]} [{first}, {first + count})"
            assert placed.read() == before, "pack wrote into the engine's memory"

    @gpu_law("G2")
    def test_unpack_writes_the_cells_and_nothing_else(self) -> None:
        for pages, connector, placed in self.worlds():
            expected = bytearray(placed.read())
            for first, count in self.selections(pages):
                payload = scattered(pages, expected, first, count)
                self.finish(connector.unpack(0, TABLE, first, count, memoryview(payload)))
                assert placed.read() == expected, f"{pages.specs[0]} [{first}, {first + count})"

    @gpu_law("G3")
    def test_bad_request_is_refused_and_touches_nothing(self) -> None:
        for pages, connector, placed in self.worlds():
            size, before = pages.specs[0].states, placed.read()
            right = sum(spec.heads * spec.cell_bytes for spec in pages.specs)
            requests = [
                (0, (0, 9), 0, 2 * size, 0, "block out of range"),
                (0, (0, -1), 0, 2 * size, 0, "negative block"),
                (0, TABLE, 0, 4 * size, 0, "more than the listed blocks"),
                (0, TABLE, -1, size, 0, "negative start"),
                (0, TABLE, 0, size, 1, "buffer too long"),
                (0, TABLE, 0, size, -1, "buffer too short"),
                (7, TABLE, 0, size, 0, "group that is not bound"),
            ]
            if pages.specs[0].interior is Interior.PAGE:
                requests.append((0, TABLE, 1, size, 0, "part of an opaque block"))
            for group, blocks, first, count, extra, what in requests:
                for copy in (connector.pack, connector.unpack):
                    buffer = bytearray(b"\xee") * (right * count + extra)
                    try:
                        self.finish(copy(group, blocks, first, count, memoryview(buffer)))
                    except ValueError:
                        assert buffer.count(0xEE) == len(buffer), f"{what}: buffer touched"
                        continue
                    raise AssertionError(f"{what}: accepted")
            assert placed.read() == before, "a refused copy touched the engine's memory"

    @gpu_law("G4")
    def test_digests_find_the_damaged_segment(self) -> None:
        for pages, connector, _ in self.worlds():
            count = 3 * pages.specs[0].states
            into = bytearray(count * sum(one.heads * one.cell_bytes for one in pages.specs))
            copied = self.finish(connector.pack(0, TABLE, 0, count, memoryview(into), seed=5))
            ends = segment_ends(pages, count)
            pieces = [into[start:end] for start, end in zip([0, *ends], ends, strict=False)]
            digests = b"".join(xxhash.xxh3_128_digest(bytes(piece), 5) for piece in pieces)
            assert copied.digests == digests
            for damaged in (-1, 0, len(ends) - 1):
                bad = bytearray(into)
                if damaged >= 0:
                    bad[ends[damaged] - 1] ^= 1
                fence = connector.unpack(
                    0, TABLE, 0, count, memoryview(bad), seed=5, digests=digests
                )
                assert self.finish(fence).bad_segment == damaged

    @gpu_law("G5")
    def test_layers_are_copied_alone(self) -> None:
        for pages, connector, placed in self.worlds():
            count, before = 3 * pages.specs[0].states, bytearray(placed.read())
            for layer in sorted({spec.layer for spec in pages.specs}):
                only = Pages(pages.memory, tuple(s for s in pages.specs if s.layer == layer))
                expected = gathered(only, before, 0, count)
                into = bytearray(len(expected))
                fence = connector.pack(0, TABLE, 0, count, memoryview(into), layers=[layer])
                self.finish(fence)
                assert into == expected
                payload = memoryview(scattered(only, before, 0, count))
                self.finish(connector.unpack(0, TABLE, 0, count, payload, layers=[layer]))
                assert placed.read() == before

    @gpu_law("G6")
    def test_both_sides_are_free_after_the_fence(self) -> None:
        """Seen in vllm#45704, vllm#47282."""
        for pages, connector, placed in self.worlds():
            count, expected = 3 * pages.specs[0].states, bytearray(placed.read())
            payload = scattered(pages, expected, 0, count)
            self.finish(connector.unpack(0, TABLE, 0, count, memoryview(payload)))
            payload[:] = bytes(len(payload))
            assert placed.read() == expected, "the payload was read after its fence"
            self.finish(connector.pack(0, TABLE, 0, count, memoryview(payload)))
            payload[:] = b"\xee" * len(payload)
            placed.read()
            assert payload.count(0xEE) == len(payload), "written after its fence"
            payload.append(0)  # Python refuses to resize what a view still looks at

    @gpu_law("G7")
    def test_close_is_idempotent_and_lets_the_memory_go(self) -> None:
        pages = make_pages(self.orders[0], interior=self.interiors[0], states=1)
        connector, tensor = self.make_connector(), Tensor()
        connector.bind({"kv": tensor}, self.place(pages).specs)
        holders = len(gc.get_referrers(tensor))
        connector.close()
        connector.close()
        gc.collect()
        assert len(gc.get_referrers(tensor)) < holders, "the tensors are still held"


class Tensor:
    """Something that a connector may only hold."""


def gathered(pages: Pages, memory: bytes | bytearray, first: int, count: int) -> bytes:
    """The payload of a selection, cell by cell."""
    cells = pages.cells(array("q", TABLE), first, count)
    return b"".join(memory[at : at + nbytes] for at, nbytes in cells)


def scattered(pages: Pages, memory: bytearray, first: int, count: int) -> bytearray:
    """Make a new payload for a selection and write it into ``memory``, cell by cell."""
    payload = bytearray()
    for at, nbytes in pages.cells(array("q", TABLE), first, count):
        piece = bytes(255 - value for value in memory[at : at + nbytes])
        memory[at : at + nbytes] = piece
        payload += piece
    return payload


def segment_ends(pages: Pages, count: int) -> list[int]:
    """Where each segment (the planes of one layer) ends in a payload."""
    ends = [0]
    for _, planes in groupby(pages.specs, key=lambda spec: spec.layer):
        ends.append(ends[-1] + count * sum(one.heads * one.cell_bytes for one in planes))
    return ends[1:]
