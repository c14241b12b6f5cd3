"""The connector against tensor arithmetic, for every layout that can lie in host memory."""

import itertools

import pytest
import torch
from lmcache_gpu_cpu import CPUConnector

from lmcache_core.spi import Interior, PageSpec, page_spec

LAYERS, BLOCKS, HEADS, SLOTS, WIDTH = 3, 7, 2, 4, 8
ORDERS = ["lbnhc", "lbhnc", "lhbnc", "blhnc", "blnhc", "bhlnc"]
TABLE = [5, 2, 6]


def engine_memory(order: str, *, fill: bool) -> torch.Tensor:
    """Keys and values side by side in a cell, [layer, block, head, slot, 2 * width], in physical ``order``."""
    size = {"l": LAYERS, "b": BLOCKS, "h": HEADS, "n": SLOTS, "c": 2 * WIDTH}
    shape = [size[axis] for axis in order]
    memory = torch.randn(shape) if fill else torch.full(shape, -1.0)
    return memory.permute([order.index(axis) for axis in "lbhnc"])


def planes(memory: torch.Tensor) -> list[PageSpec]:
    return [
        page_spec(memory[layer], "bhnc", layer=layer, plane=plane, content=content)
        for layer in range(LAYERS)
        for plane, content in enumerate([(0, WIDTH), (WIDTH, 2 * WIDTH)])
    ]


def expected(memory: torch.Tensor, first: int, count: int) -> bytes:
    """[layer][k|v][token][head][dim] by indexing alone."""
    slots = [(TABLE[t // SLOTS], t % SLOTS) for t in range(first, first + count)]
    parts = [
        memory[layer, block, head, slot, side * WIDTH : (side + 1) * WIDTH]
        for layer in range(LAYERS)
        for side in range(2)
        for block, slot in slots
        for head in range(HEADS)
    ]
    return torch.cat(parts).numpy().tobytes() if parts else b""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("first", "count"), [(0, 12), (0, 1), (3, 6), (4, 4), (11, 1), (2, 0)])
def test_packed_rows_equal_indexing_in_every_physical_order(order, first, count) -> None:
    memory = engine_memory(order, fill=True)
    connector = CPUConnector()
    connector.bind({"kv": memory}, planes(memory))
    into = bytearray(LAYERS * 2 * count * HEADS * WIDTH * 4)
    copied = connector.pack(0, TABLE, first, count, memoryview(into), seed=3).wait()
    assert bytes(into) == expected(memory, first, count)
    assert copied is not None
    assert len(copied.digests or b"") == 16 * LAYERS


@pytest.mark.parametrize(("source", "target"), list(itertools.product(ORDERS[::2], ORDERS[1::2])))
def test_what_one_layout_packed_another_unpacks_and_nothing_else_changes(source, target) -> None:
    there, here = engine_memory(source, fill=True), engine_memory(target, fill=False)
    sender, receiver = CPUConnector(), CPUConnector()
    sender.bind({"kv": there}, planes(there))
    receiver.bind({"kv": here}, planes(here))
    payload = bytearray(LAYERS * 2 * 6 * HEADS * WIDTH * 4)
    copied = sender.pack(0, TABLE, 3, 6, memoryview(payload), seed=9).wait()
    assert copied is not None
    done = receiver.unpack(
        0, TABLE, 3, 6, memoryview(payload), seed=9, digests=copied.digests
    ).wait()
    assert done is not None
    assert done.bad_segment == -1
    wanted = torch.full_like(there, -1.0)
    for token in range(3, 9):
        at = (slice(None), TABLE[token // SLOTS], slice(None), token % SLOTS)
        wanted[at] = there[at]
    assert torch.equal(here, wanted)


def test_a_flipped_bit_is_reported_with_its_segment() -> None:
    memory = engine_memory("lbnhc", fill=True)
    connector = CPUConnector()
    connector.bind({"kv": memory}, planes(memory))
    payload = bytearray(LAYERS * 2 * 12 * HEADS * WIDTH * 4)
    copied = connector.pack(0, TABLE, 0, 12, memoryview(payload), seed=1).wait()
    assert copied is not None
    payload[len(payload) // 2] ^= 4
    done = connector.unpack(
        0, TABLE, 0, 12, memoryview(payload), seed=1, digests=copied.digests
    ).wait()
    assert done is not None
    assert done.bad_segment == 1


def test_one_layer_alone_is_its_slice_of_the_whole() -> None:
    memory = engine_memory("bhlnc", fill=True)
    connector = CPUConnector()
    connector.bind({"kv": memory}, planes(memory))
    whole = bytearray(LAYERS * 2 * 8 * HEADS * WIDTH * 4)
    connector.pack(0, TABLE, 0, 8, memoryview(whole)).wait()
    part = bytearray(len(whole) // LAYERS)
    connector.pack(0, TABLE, 0, 8, memoryview(part), layers=[1]).wait()
    assert part == whole[len(part) : 2 * len(part)]


def test_contiguous_rows_of_one_sequence_are_one_block() -> None:
    keys, values = torch.randn(2, HEADS, 10, WIDTH), torch.randn(2, HEADS, 10, WIDTH)
    connector = CPUConnector()
    tensors = {"k": keys, "v": values}
    specs = [page_spec(t[1], "hnc", layer=0, plane=p) for p, t in enumerate((keys, values))]
    connector.bind(tensors, specs)
    into = bytearray(2 * 5 * HEADS * WIDTH * 4)
    connector.pack(0, [0], 5, 5, memoryview(into)).wait()
    wanted = torch.stack([keys[1, :, 5:10], values[1, :, 5:10]]).transpose(1, 2)
    assert bytes(into) == wanted.contiguous().numpy().tobytes()


def test_opaque_blocks_move_whole_and_never_in_part() -> None:
    memory = torch.randn(BLOCKS, HEADS, SLOTS, 2 * WIDTH)
    spec = page_spec(memory, "bhnc", layer=0, interior=Interior.PAGE)
    connector = CPUConnector()
    connector.bind({"kv": memory}, [spec])
    into = bytearray(2 * spec.block_nbytes)
    connector.pack(0, TABLE, 4, 8, memoryview(into)).wait()
    assert bytes(into) == memory[TABLE[1:]].numpy().tobytes()
    with pytest.raises(ValueError, match="block"):
        connector.pack(0, TABLE, 2, 8, memoryview(into))


def test_a_block_out_of_range_is_refused_before_anything_moves() -> None:
    memory = engine_memory("lbnhc", fill=False)
    connector = CPUConnector()
    connector.bind({"kv": memory}, planes(memory))
    payload = bytearray(LAYERS * 2 * 8 * HEADS * WIDTH * 4)
    with pytest.raises(ValueError, match="block"):
        connector.unpack(0, [1, BLOCKS], 0, 8, memoryview(payload))
    assert torch.equal(memory, torch.full_like(memory, -1.0))


def test_an_unbound_group_is_named() -> None:
    connector = CPUConnector()
    with pytest.raises(ValueError, match="group 4"):
        connector.pack(4, [0], 0, 1, memoryview(bytearray(8)))


def test_axes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="axes"):
        page_spec(torch.zeros(2, 3), "bhc", layer=0)
    with pytest.raises(ValueError, match="contiguous"):
        page_spec(torch.zeros(2, 3).T, "nc", layer=0)
