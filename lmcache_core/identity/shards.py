"""Parts of a chunk: who holds which heads of which layers, and how parts make up others.

Ranks are not identity. A shard is a head range times a layer range, and a value below the arena
holds all shards of its node. Only ``Interior.ROWS`` content can be cut along heads; ``PAGE`` and
``STATE`` segments are taken whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lmcache_core.identity.space import Group
from lmcache_core.spi.layout import Interior, KVSpec, SegmentSpec

ELEMENT_NBYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """Layers [layer_begin, layer_end) and KV heads [head_begin, head_end) of the whole model."""

    layer_begin: int
    layer_end: int
    head_begin: int
    head_end: int


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` equal pieces to copy from a source payload to a wanted payload.

    Piece ``i`` is ``nbytes`` long, at ``source + i*source_stride`` and ``target +
    i*target_stride``.

    Attributes:
        segment: index of the source segment, whose digest covers the piece.
    """

    segment: int
    source: int
    target: int
    nbytes: int
    count: int
    source_stride: int
    target_stride: int


def rows_spec(group: Group, shards: Iterable[Shard], *, tokens: int | None = None) -> KVSpec:
    """Stored form of one chunk of a ``ROWS`` group as written by the given shards.

    Segments are ordered by layer, then head, equal head ranges once (latent attention is held by
    all ranks).

    Args:
        tokens: of a partial chunk; default ``group.tokens_per_chunk``.
    """
    if group.interior is not Interior.ROWS:
        raise ValueError(f"a {group.interior.value} group has no canonical rows")
    tokens = group.tokens_per_chunk if tokens is None else tokens
    cell = group.planes * tokens * group.head_dim * ELEMENT_NBYTES[group.dtype]
    cells = {
        (layer, shard.head_begin, shard.head_end)
        for shard in shards
        for layer in group.layers
        if shard.layer_begin <= layer < shard.layer_end
    }
    segments = tuple(SegmentSpec(layer, b, e, cell * (e - b)) for layer, b, e in sorted(cells))
    heads = group.head_range[1] - group.head_range[0]
    return KVSpec(
        group.dtype, tokens, group.planes, heads, group.head_dim, group.interior, segments
    )


def select(spec: KVSpec, shard: Shard) -> tuple[SegmentSpec, ...]:
    """Segments a shard wants of a chunk stored as ``spec``: one per layer, heads joined."""
    if spec.interior is not Interior.ROWS:
        return tuple(
            s for s in spec.segments
            if shard.layer_begin <= s.layer < shard.layer_end
            and shard.head_begin <= s.head_begin and s.head_end <= shard.head_end
        )  # fmt: skip
    per_head = {s.layer: s.nbytes // (s.head_end - s.head_begin) for s in spec.segments}
    return tuple(
        SegmentSpec(
            layer, shard.head_begin, shard.head_end, nbytes * (shard.head_end - shard.head_begin)
        )
        for layer, nbytes in sorted(per_head.items())
        if shard.layer_begin <= layer < shard.layer_end
    )


def join(source: KVSpec, wanted: Sequence[SegmentSpec]) -> tuple[Run, ...] | None:
    """Copies that build wanted segments, back to back, from a stored payload; None = a part lacks.

    Behaviour: splitting and joining are one thing: each wanted head range is cut out of whatever
    ranges are stored. Source ranges may overlap; the first in payload order gives the bytes.
    """
    offsets = [*accumulate((segment.nbytes for segment in source.segments), initial=0)]
    runs: list[Run] = []
    target = 0
    for want in wanted:
        if want in source.segments:
            index = source.segments.index(want)
            runs.append(Run(index, offsets[index], target, want.nbytes, 1, 0, 0))
        else:
            found = _cut(source, offsets, want, target)
            if found is None:
                return None
            runs += found
        target += want.nbytes
    return tuple(runs)


def _cut(source: KVSpec, offsets: list[int], want: SegmentSpec, target: int) -> list[Run] | None:
    """Runs for one wanted ``[plane][token][head][dim]`` segment out of those of the same layer."""
    rows = source.planes * source.tokens
    width = want.head_end - want.head_begin
    if source.interior is not Interior.ROWS or width < 1 or want.nbytes % (rows * width):
        return None
    cell = want.nbytes // (rows * width)
    runs, head = [], want.head_begin
    parts = [(s.head_begin, i, s) for i, s in enumerate(source.segments) if s.layer == want.layer]
    for begin, index, have in sorted(parts, key=lambda part: part[0]):
        if not begin <= head < min(have.head_end, want.head_end):
            continue
        stride = cell * (have.head_end - begin)
        if have.nbytes != rows * stride:
            return None
        end = min(have.head_end, want.head_end)
        runs.append(
            Run(
                segment=index,
                source=offsets[index] + (head - begin) * cell,
                target=target + (head - want.head_begin) * cell,
                nbytes=(end - head) * cell,
                count=rows,
                source_stride=stride,
                target_stride=width * cell,
            )
        )
        head = end
    return runs if head == want.head_end else None


def copy_runs(runs: Iterable[Run], source: memoryview, target: memoryview) -> None:
    """Carry out the copies between two payloads; both are flat byte views."""
    for run in runs:
        for i in range(run.count):
            a = run.source + i * run.source_stride
            b = run.target + i * run.target_stride
            target[b : b + run.nbytes] = source[a : a + run.nbytes]


def writer_of(digest: bytes, ranks: int) -> int:
    """Rank that stores a chunk all ranks hold alike (latent attention); rotates over chunks."""
    return int.from_bytes(digest[:8], "little") % ranks
