"""Plane tables refuse what no engine can mean, before anybody follows a pointer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lmcache_core.ops import PlaneTable
from lmcache_core.spi.layout import Interior, PageSpec

PLANE = PageSpec(
    layer=0, plane=0, group=0, pointer=4096, blocks=8, heads=2, states=16, cell_bytes=64,
    block_stride=2048, state_stride=128, head_stride=64, interior=Interior.ROWS,
)  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"heads": 0},
        {"states": 0},
        {"cell_bytes": 0},
        {"blocks": -1},
        {"pointer": -1},
        {"block_stride": -64},
    ],
)
def test_an_impossible_shape_is_named(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="plane 1 has an impossible shape"):
        PlaneTable([PLANE, replace(PLANE, **change)])


def test_all_planes_count_in_one_unit() -> None:
    with pytest.raises(ValueError, match="plane 1 has 8 states, expected 16"):
        PlaneTable([PLANE, replace(PLANE, states=8)])
    with pytest.raises(ValueError, match="plane 0 has 16 states, expected 1"):
        PlaneTable([replace(PLANE, interior=Interior.STATE)])


def test_segments_are_runs_of_one_layer() -> None:
    table = PlaneTable([replace(PLANE, layer=layer) for layer in (3, 3, 4, 5, 5, 3)])
    assert table.segments == 4
    assert list(table.packed[-5:]) == [0, 2, 3, 5, 6]
    assert table.nbytes(10) == 6 * 2 * 64 * 10


def test_a_block_id_must_exist_in_every_plane() -> None:
    assert PlaneTable([PLANE, replace(PLANE, blocks=3)]).blocks == 3
