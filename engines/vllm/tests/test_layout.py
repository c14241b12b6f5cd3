"""How memory of any order becomes chunks, who writes what of them, and what is refused."""

import itertools

import pytest
import torch
from lmcache_engine_vllm.groups import Part
from lmcache_engine_vllm.layout import Ranks, keep
from lmcache_gpu_cpu import CPUConnector

from lmcache_core.spi import ConfigError, Interior, Reuse

B, H, N, C, L = 6, 2, 4, 8, 3
ORDERS = ("LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
SIZES = {"L": L, "B": B, "H": H, "N": N, "C": C}


def memory(order, fill):
    """Registered views of all layers in one physical order; [block, head, token, content] each."""
    whole = torch.zeros([SIZES[axis] for axis in order])
    logical = whole.permute([order.index(axis) for axis in "LBHNC"])
    if fill:
        logical.copy_(torch.arange(L * B * H * N * C).reshape(L, B, H, N, C))
    return {f"model.layers.{layer}.attn": logical[layer] for layer in range(L)}


def kept(tensors, backend="FLASH_ATTN", ranks=None, **how):
    part = Part(0, N, Reuse.ALL, 0, tuple(tensors))
    backends = dict.fromkeys(tensors, backend)
    given = {"chunk": 2 * N, "number": 0, "blocks": B, "release": "1"} | how
    return keep(part, tensors, backends, ranks or Ranks(), **given)


def bound(tensors, made):
    connector = CPUConnector()
    connector.bind(tensors, made.specs)
    return connector


@pytest.mark.parametrize(("source", "target"), [*itertools.product(ORDERS, ORDERS)])
def test_rows_mean_the_same_in_every_order_of_memory(source, target):
    """Seen in dynamo#14416."""
    ours, theirs = memory(source, fill=True), memory(target, fill=False)
    out, back = kept(ours), kept(theirs)
    assert out.form == back.form
    assert out.form.interior is Interior.ROWS
    payload = memoryview(bytearray(out.form.nbytes))
    bound(ours, out).pack(0, [4, 1], 0, 2 * N, payload, seed=0)
    bound(theirs, back).unpack(0, [2, 5], 0, 2 * N, payload)
    for name in ours:
        assert torch.equal(theirs[name][[2, 5]], ours[name][[4, 1]])
        assert not theirs[name][[0, 1, 3, 4]].any()


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "CPU_ATTN:vec"])
def test_a_part_of_a_chunk_is_cut_out_of_its_payload(backend):
    ours, theirs = memory("LBHNC", fill=True), memory("LBHNC", fill=False)
    out = kept(ours, backend)
    payload = memoryview(bytearray(out.form.nbytes))
    bound(ours, out).pack(0, [4, 1], 0, 2 * N, payload)
    (piece,) = out.pieces
    half = out.cut(payload, piece, N, N)
    bound(theirs, kept(theirs, backend)).unpack(0, [0, 3], N, N, half)
    for name in ours:
        assert torch.equal(theirs[name][3], ours[name][1])
        assert not theirs[name][[0, 1, 2, 4, 5]].any()


def test_unknown_backends_are_kept_as_whole_blocks_that_only_they_read():
    made, other = (kept(memory("LBHNC", fill=False), name) for name in ("NEW_ATTN", "CPU_ATTN:vec"))
    assert made.form.interior is other.form.interior is Interior.PAGE
    assert made.group.encoding != other.group.encoding
    assert made.group.page_size == N


def test_latent_vectors_are_one_plane_written_by_one_of_all_ranks():
    """Seen in LMCache#2881."""
    tensors = {"model.layers.0.attn": torch.zeros(B, 1, N, C)}
    all_ranks = [Ranks(rank, 2, 1, 2) for rank in range(2)]
    first, second = (kept(tensors, "FLASHMLA", ranks) for ranks in all_ranks)
    assert first.form == second.form
    assert first.form.planes == 1
    assert first.mine == second.mine == (0,)
    assert [ranks.writes for ranks in all_ranks] == [True, False]


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "CPU_ATTN:vec"])
def test_ranks_own_all_segments_once(backend):
    tensors = memory("LBHNC", fill=False)
    made = [kept(tensors, backend, Ranks(rank, 2)) for rank in range(2)]
    assert made[0].form == made[1].form
    assert sorted(made[0].mine + made[1].mine) == list(range(2 * L))
    pages = backend.startswith("CPU")
    assert [len(each.pieces) for each in made] == ([1, 1] if pages else [L, L])
    for each in made:
        assert sum(piece.nbytes for piece in each.pieces) * 2 == each.form.nbytes


def test_stages_of_a_pipeline_fill_one_chunk():
    """Seen in LMCache#1357."""
    stages = ((0, L), (L, 2 * L))
    names = [f"model.layers.{n}.attn" for n in range(2 * L)]
    made = []
    for stage in range(2):
        held = dict(zip(names[L * stage :], memory("LBHNC", fill=False).values(), strict=False))
        made.append(kept(held, "CPU_ATTN:vec", Ranks(stage, 1, 2, 1, stages)))
    assert made[0].form == made[1].form
    assert made[0].group == made[1].group
    assert [each.mine for each in made] == [(0, 1, 2), (3, 4, 5)]


def test_blocks_of_the_engine_may_be_several_of_the_kernel():
    tensors = {name: torch.zeros(2 * B, H, N // 2, C) for name in ("model.layers.0.attn",)}
    made = kept(tensors)
    assert made.ratio == 2
    assert made.place([3, 0], 0, 2 * N) == ([6, 7, 0, 1], 0, 2 * N)


def stateful(kind="MAMBA2"):
    """Memory of one recurrent layer whose blocks are padded, and how it is kept: chunks of two blocks."""
    padded = torch.arange(B * 2 * C, dtype=torch.int8).reshape(B, 2 * C)
    tensors = {"model.layers.1.mixer": padded[:, :C].reshape(B, 1, 1, C)}
    part = Part(1, N, Reuse.POINT, 0, tuple(tensors), f"mamba_type={kind}")
    return tensors, keep(part, tensors, {}, Ranks(), chunk=2 * N, number=0, blocks=B, release="1")


def test_a_state_is_the_one_block_at_the_end_of_its_chunk():
    tensors, made = stateful()
    (tensor,) = tensors.values()
    assert made.form.interior is Interior.STATE
    assert made.form.nbytes == C
    assert made.form.tokens == 2 * N
    payload = memoryview(bytearray(C))
    where = made.place([0, 0, 0, 5], 2 * N, 2 * N)
    assert where == ([5], 0, 1)
    before = tensor.clone()
    bound(tensors, made).pack(0, *where, payload)
    assert bytes(payload) == before[5].numpy().tobytes()
    bound(tensors, made).unpack(0, *made.place([0, 2], 0, 2 * N), payload)
    assert torch.equal(tensor[2], before[5])
    assert torch.equal(tensor[[0, 1, 3, 4, 5]], before[[0, 1, 3, 4, 5]])
    assert made.place([0], 0, 2 * N) == ([0], 0, 1)  # a table that ends before it: nowhere


def test_states_of_another_make_are_not_read():
    assert stateful("MAMBA2")[1].group.encoding != stateful("GDN_ATTN")[1].group.encoding


def test_what_vllm_computes_wrongly_on_a_cpu_is_refused():
    with pytest.raises(ConfigError, match="whosever the state"):
        stateful("MambaAttentionBackendEnum.SHORT_CONV")
    with pytest.raises(ConfigError, match="whosever it is"):
        kept(memory("LBHNC", fill=False), "CPU_MLA")
