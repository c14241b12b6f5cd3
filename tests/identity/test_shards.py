from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_core.identity import Shard, copy_runs, join, rows_spec, select, writer_of
from lmcache_core.spi.layout import Interior, KVSpec, SegmentSpec
from tests.identity.samples import group, pages

GROUP = group(dtype="int8", heads=8, head_range=(0, 8), head_dim=3, layers=(0, 2, 5))
TOKENS = 4
EVERYTHING = Shard(0, 6, 0, 8)


def cell(layer: int, plane: int, token: int, head: int) -> bytes:
    return bytes([layer * 16 + plane, token, head])


def payload(segments: tuple[SegmentSpec, ...]) -> bytes:
    """What the given segments must contain, cell by cell."""
    return b"".join(
        cell(s.layer, plane, token, head)
        for s in segments
        for plane in range(GROUP.planes)
        for token in range(TOKENS)
        for head in range(s.head_begin, s.head_end)
    )


def split(heads: int, layers: int = 1) -> list[Shard]:
    """Shards of an engine with so many ranks along heads and layers."""
    step = 6 // layers
    return [
        Shard(a, a + step, b, b + 8 // heads)
        for a in range(0, 6, step)
        for b in range(0, 8, 8 // heads)
    ]


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 3]),
)
def test_chunks_written_by_any_ranks_are_read_by_any_others(
    heads: int, layers: int, reader_heads: int, reader_layers: int
) -> None:
    """Seen in LMCache#2406."""
    stored = rows_spec(GROUP, split(heads, layers), tokens=TOKENS)
    source = payload(stored.segments)
    assert stored.nbytes == len(source)
    for shard in split(reader_heads, reader_layers):
        wanted = select(stored, shard)
        runs = join(stored, wanted)
        assert runs is not None
        target = bytearray(sum(s.nbytes for s in wanted))
        copy_runs(runs, memoryview(source), memoryview(target))
        assert target == payload(wanted)


def test_ranges_that_cross_borders_are_joined() -> None:
    """Seen in sglang#26670."""
    stored = rows_spec(GROUP, split(4), tokens=TOKENS)
    wanted = select(stored, Shard(2, 3, 1, 7))
    runs = join(stored, wanted)
    assert runs is not None and len(runs) == 4
    target = bytearray(wanted[0].nbytes)
    copy_runs(runs, memoryview(payload(stored.segments)), memoryview(target))
    assert target == payload(wanted)


def test_equal_segments_are_one_piece() -> None:
    stored = rows_spec(GROUP, split(2), tokens=TOKENS)
    runs = join(stored, stored.segments)
    assert runs is not None
    assert [(r.source, r.target, r.count) for r in runs] == [
        (i * r.nbytes, i * r.nbytes, 1) for i, r in enumerate(runs)
    ]


def test_a_missing_part_is_a_miss() -> None:
    """Seen in sglang#31108."""
    half = rows_spec(GROUP, split(2)[:1], tokens=TOKENS)
    assert join(half, select(half, EVERYTHING)) is None
    first_layers = rows_spec(GROUP, split(1, 2)[:1], tokens=TOKENS)
    whole = rows_spec(GROUP, [EVERYTHING], tokens=TOKENS)
    assert join(first_layers, whole.segments) is None
    assert join(whole, [SegmentSpec(0, 0, 8, 7)]) is None
    assert join(whole, [SegmentSpec(0, 3, 3, 0)]) is None


def test_latent_content_is_stored_once_by_all_ranks() -> None:
    latent = group(heads=1, head_range=(0, 1), planes=1, head_dim=576, layers=(0, 1))
    spec = rows_spec(latent, [Shard(0, 2, 0, 1)] * 4)
    assert [(s.layer, s.nbytes) for s in spec.segments] == [(0, 16 * 576 * 2), (1, 16 * 576 * 2)]


def test_writers_rotate_evenly() -> None:
    counts = Counter(writer_of(i.to_bytes(8, "little") + bytes(24), 4) for i in range(400))
    assert counts == {0: 100, 1: 100, 2: 100, 3: 100}
    assert writer_of(b"\xff" * 32, 1) == 0


def test_opaque_segments_are_taken_whole_or_not_at_all() -> None:
    with pytest.raises(ValueError, match="no canonical rows"):
        rows_spec(pages(), [EVERYTHING])
    segments = (SegmentSpec(0, 0, 4, 10), SegmentSpec(0, 4, 8, 10), SegmentSpec(1, 0, 8, 20))
    stored = KVSpec("uint8", 16, 1, 8, 0, Interior.PAGE, segments)
    assert select(stored, Shard(0, 1, 4, 8)) == segments[1:2]
    runs = join(stored, segments[1:])
    assert runs is not None and [(r.source, r.nbytes) for r in runs] == [(10, 10), (20, 20)]
    assert join(stored, [SegmentSpec(0, 0, 8, 20)]) is None
