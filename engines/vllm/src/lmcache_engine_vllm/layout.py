"""How the KV cache groups of an engine are kept: read off its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

from lmcache_core import frame
from lmcache_core.identity import Group, Shard, rows_spec
from lmcache_core.spi import (
    ConfigError,
    Corrupt,
    Interior,
    KVSpec,
    PageSpec,
    Reuse,
    SegmentSpec,
    page_spec,
)
from lmcache_core.wire.records import Form
from lmcache_engine_vllm.groups import Part

ROWS = {
    "FLASH_ATTN", "FLASH_ATTN_VLLM_V1", "FLASHINFER", "TRITON_ATTN", "TRITON_ATTN_VLLM_V1", "FLEX_ATTENTION",
    "FLASHMLA", "TRITON_MLA", "CUTLASS_MLA", "FLASHINFER_MLA",
}  # fmt: skip
"""Attention backends whose (token, head) cells are plain rows; of all others only whole blocks are known."""
PLAIN = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where a worker stands.

    Attributes:
        rank, world: of all workers of the engine.
        tensor, pipeline: degrees of parallelism.
        replicas: neighbouring tensor-parallel ranks that hold the same heads.
        stages: layers [begin, end) of each pipeline stage; empty: every rank has all.
    """

    rank: int = 0
    tensor: int = 1
    pipeline: int = 1
    replicas: int = 1
    stages: tuple[tuple[int, int], ...] = ()

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline

    @property
    def shards(self) -> int:
        return self.tensor // self.replicas

    @property
    def shard(self) -> int:
        return self.rank % self.tensor // self.replicas

    @property
    def stage(self) -> int:
        return self.rank // self.tensor

    @property
    def writes(self) -> bool:
        """Whether this is the one of several equal ranks that stores."""
        return self.rank % self.tensor % self.replicas == 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of the payload that belongs to this rank.

    Attributes:
        layers: None means all it has of the group.
        mine: positions of the segments.
    """

    offset: int
    nbytes: int
    layers: tuple[int, ...] | None
    mine: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """How the chunks of one part are stored, seen from one rank.

    Attributes:
        specs: of this rank's planes.
        group: what the key space says.
        form: of a full chunk, all ranks together.
        room: bytes of header in front.
        mine: positions of this rank's segments in the form.
        pieces: the same as runs of the payload.
        ratio: engine blocks make so many blocks of the tensors.
        numbers: transformer layer of each name.
    """

    part: Part
    specs: tuple[PageSpec, ...]
    group: Group
    form: KVSpec
    room: int
    mine: tuple[int, ...]
    pieces: tuple[Piece, ...]
    ratio: int
    numbers: Mapping[str, int]

    def layer(self, number: int) -> tuple[Piece, ...]:
        """What this rank has of one layer."""
        return _pieces(self.form, [n for n in self.mine if self.form.segments[n].layer == number])

    def names(self, number: int) -> set[str]:
        """Everything that makes up one layer."""
        return {name for name, layer in self.numbers.items() if layer == number}

    @property
    def wire(self) -> Form:
        """The form as the daemon is told."""
        form = self.form
        segments = [(s.layer, s.head_begin, s.head_end, s.nbytes) for s in form.segments]
        return Form(
            self.room, form.dtype, form.tokens, form.planes, form.heads, form.head_dim,
            form.interior.value, segments,
        )  # fmt: skip

    def place(self, table: Sequence[int], first: int, count: int) -> tuple[Sequence[int], int, int]:
        """Blocks of the tensors, and the range in them, that hold tokens [first, first + count).

        A state is one block, that of the last token; nothing holds it where that is block 0.
        """
        if self.part.reuse is Reuse.POINT:
            last = (first + count) // self.part.block - 1
            return ([table[last]] if last < len(table) else [0]), 0, 1
        if self.ratio == 1:
            return table, first, count
        return [block * self.ratio + i for block in table for i in range(self.ratio)], first, count

    def intact(self, part: memoryview, piece: Piece, header: frame.Header) -> bool:
        """Whether a run of segments is what was stored, of which only a part is going to be copied."""
        sizes = [self.form.segments[n].nbytes for n in piece.mine]
        try:
            for n, at, size in zip(piece.mine, accumulate(sizes, initial=0), sizes, strict=False):
                frame.verify_segment(header, n, part[at : at + size])
        except Corrupt:
            return False
        return True

    def cut(self, part: memoryview, piece: Piece, first: int, count: int) -> memoryview:
        """Tokens [first, first + count) of a run of segments, as a payload of their own."""
        tokens, planes = self.form.tokens, self.form.planes
        sizes = [self.form.segments[n].nbytes // planes for n in piece.mine for _ in range(planes)]
        pieces = [
            part[at + size // tokens * first : at + size // tokens * (first + count)]
            for at, size in zip(accumulate(sizes, initial=0), sizes, strict=False)
        ]
        return memoryview(b"".join(pieces))


def keep(
    part: Part,
    tensors: Mapping[str, Any],
    backends: Mapping[str, str],
    ranks: Ranks,
    *,
    chunk: int,
    number: int,
    blocks: int,
    release: str,
) -> Kept:
    """Decide how one part is stored.

    Args:
        tensors: registered memory by layer name, [block, head, token, content] each.
        backends: attention backend, with everything that decides the inside of a block, by layer name.
        number: of the part among those that are kept.
        blocks: that the engine has.
        release: of the engine; blocks that only it understands are not read by another one.

    Raises:
        ConfigError: memory that is laid out in a way not known here.
    """
    held = {name: tensors[name] for name in part.layers if name in tensors}
    if not held:
        raise ConfigError(
            f"none of the layers of group {part.index} is registered: {part.layers[:3]}"
        )
    first = next(iter(held.values()))
    shapes = {(tuple(t.shape), str(t.dtype)) for t in held.values()}
    if any(len(shape) != 4 for shape, _ in shapes) or first.shape[0] % blocks:
        raise ConfigError(f"memory of group {part.index} has shapes {sorted(shapes)[:3]}")
    ratio = first.shape[0] // blocks
    point = part.reuse is Reuse.POINT
    states, dtype = part.block // ratio, str(first.dtype).removeprefix("torch.")
    names = {part.state} if point else {backends.get(name, "unknown") for name in held}
    split = [] if point else _split(part, shapes, names, dtype, first)
    interior = Interior.STATE if point else Interior.ROWS if split else Interior.PAGE
    numbers = _numbers(held)
    specs = tuple(
        page_spec(
            held[name], "bhnc", layer=numbers[name], group=number, plane=plane, content=content,
            interior=interior,
        )
        for name in sorted(held, key=lambda name: (numbers[name], name))
        for plane, content in enumerate(split or [None])
    )  # fmt: skip
    if any(name.startswith("CPU_MLA") for name in names):
        raise ConfigError(
            "latent attention of vLLM on CPU computes no token on top of a prefix, whosever it is"
        )
    if "short_conv" in part.state.lower() and first.device.type == "cpu":
        raise ConfigError(
            "short convolutions of vLLM on CPU compute otherwise when a prompt goes in two steps, "
            "whosever the state in between is"
        )
    if any(spec.states != (1 if point else states) for spec in specs):
        raise ConfigError(
            f"blocks of group {part.index} hold {specs[0].states} tokens, not {states}"
        )
    sizes = {
        layer: (1 if point else chunk // states) * sum(spec.block_nbytes for spec in planes)
        for layer, planes in groupby(specs, key=lambda spec: spec.layer)
    }
    heads = first.shape[1] * ranks.shards if split else ranks.shards
    group = Group(
        reuse=part.reuse,
        window=part.window,
        tokens_per_chunk=chunk,
        layers=_all_layers(sizes, ranks),
        heads=heads,
        head_range=(0, heads),
        head_dim=split[0][1] - split[0][0] if split else 0,
        planes=len(split) or 1,
        dtype=dtype,
        interior=interior,
        page_size=None if split else states,
        encoding=None if split else _encoding(shapes, names, release),
        engine=None if split else "vllm",
    )
    form = _form(group, sizes, ranks)
    mine = _own(form, ranks, set(sizes), heads // ranks.shards)
    pieces = _pieces(form, mine)
    if len(pieces) == 1:
        pieces = (replace(pieces[0], layers=None),)
    room = frame.header_nbytes(len(form.segments))
    if ranks.world > 1:
        room += frame.ALIGNMENT  # one length for all ranks, whatever the tags of a request
    return Kept(part, specs, group, form, room, mine, pieces, ratio, numbers)


def _split(
    part: Part, shapes: set[tuple[Any, str]], names: set[str], dtype: str, tensor: Any
) -> list[tuple[int, int]]:
    """Ranges of a cell's content that are planes of rows; empty where only blocks mean something."""
    if len(shapes) != 1 or not names <= ROWS or dtype not in PLAIN:
        return []
    width = int(tensor.shape[3])
    if all(name.endswith("MLA") for name in names):
        return [(0, width)]
    return [(0, width // 2), (width // 2, width)] if width % 2 == 0 else []


def _numbers(held: Mapping[str, Any]) -> dict[str, int]:
    """Transformer layer of each name; names without a number come behind all others."""
    found = {}
    for at, name in enumerate(held):
        digits = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
        found[name] = int(digits[1]) if digits else 100_000 + at
    return found


def _all_layers(sizes: Mapping[int, int], ranks: Ranks) -> tuple[int, ...]:
    if ranks.pipeline == 1:
        return tuple(sorted(sizes))
    begin, end = ranks.stages[ranks.stage]
    if set(sizes) != set(range(begin, end)) or len({*sizes.values()}) != 1:
        raise ConfigError("a pipeline whose layers differ cannot be kept")
    return tuple(range(ranks.stages[0][0], ranks.stages[-1][1]))


def _form(group: Group, sizes: Mapping[int, int], ranks: Ranks) -> KVSpec:
    per = group.heads // ranks.shards
    shards = [(per * at, per * (at + 1)) for at in range(ranks.shards)]
    if group.interior is Interior.ROWS:
        layers = (group.layers[0], group.layers[-1] + 1)
        return rows_spec(group, [Shard(*layers, *heads) for heads in shards])
    size = next(iter(sizes.values()))
    stages = ranks.stages or ((group.layers[0], group.layers[-1] + 1),)
    segments = [
        SegmentSpec(layer, *heads, sizes.get(layer, size))
        for begin, end in stages
        for heads in shards
        for layer in group.layers
        if begin <= layer < end
    ]
    return KVSpec(
        group.dtype, group.tokens_per_chunk, group.planes, group.heads, 0, group.interior,
        tuple(segments),
    )  # fmt: skip


def _own(form: KVSpec, ranks: Ranks, layers: set[int], per: int) -> tuple[int, ...]:
    begin = ranks.shard * per
    return tuple(
        at for at, s in enumerate(form.segments) if s.layer in layers and s.head_begin == begin
    )


def _pieces(form: KVSpec, mine: Sequence[int]) -> tuple[Piece, ...]:
    offsets = [*accumulate((segment.nbytes for segment in form.segments), initial=0)]
    pieces = []
    for _, run in groupby(enumerate(mine), key=lambda pair: pair[1] - pair[0]):
        at = tuple(position for _, position in run)
        own = tuple(form.segments[position].layer for position in at)
        begin = offsets[at[0]]
        pieces.append(Piece(begin, offsets[at[-1] + 1] - begin, own, at))
    return tuple(pieces)


def _encoding(shapes: set[tuple[Any, str]], names: set[str], release: str) -> str:
    cells = sorted(f"{kind}{list(shape[1:])}" for shape, kind in shapes)
    return f"{release}:{'+'.join(sorted(names))}:{'+'.join(cells)}"
