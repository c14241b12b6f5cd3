from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core.memory.slabs import Slab, Slabs

PAGE = 4096


def take(slabs: Slabs, size: int) -> tuple[Slab, int] | None:
    """An extent, from a new slab if need be."""
    return slabs.take(size) or (slabs.carve(size) and slabs.take(size)) or None


def start(place: tuple[Slab, int]) -> int:
    return place[0].base + place[1] * place[0].size


def test_one_size_fills_its_memory_to_the_last_extent() -> None:
    slabs = Slabs(64 * PAGE)
    slabs.add_segment(0, 1000 * PAGE)
    size = 33 * PAGE
    places = []
    while (place := take(slabs, size)) is not None:
        places.append(start(place))
    assert len(places) == 1000 // 33
    assert len({at // size for at in places}) == len(places)
    slabs.check()


def test_rare_size_costs_one_extent() -> None:
    slabs = Slabs(64 * PAGE)
    slabs.add_segment(0, 1000 * PAGE)
    assert take(slabs, PAGE) is not None
    assert slabs.free == 999 * PAGE
    assert slabs.stranded(999 * PAGE) == 0
    assert slabs.stranded(1000 * PAGE) == 999 * PAGE


def test_emptied_slab_serves_any_other_size() -> None:
    slabs = Slabs(64 * PAGE)
    slabs.add_segment(0, 64 * PAGE)
    places = []
    while (place := take(slabs, PAGE)) is not None:
        places.append(place)
    assert len(places) == 64
    assert take(slabs, 64 * PAGE) is None
    for slab, position in places:
        slabs.give(slab, position)
    assert take(slabs, 64 * PAGE) is not None


def test_lost_memory_is_never_given_out() -> None:
    slabs = Slabs(64 * PAGE)
    slabs.add_segment(0, 8 * PAGE)
    slab = slabs.carve(8 * PAGE)
    assert slab is not None
    slabs.lose(slab)
    assert take(slabs, PAGE) is None
    assert (slabs.free, slabs.lost) == (0, 8 * PAGE)
    slabs.check()


def test_window_is_the_cheapest_row_of_neighbours() -> None:
    slabs = Slabs(PAGE)  # one extent each
    slabs.add_segment(0, 6 * PAGE)
    places = [take(slabs, PAGE) for _ in range(6)]
    for number in (0, 3, 5):
        place = places[number]
        assert place is not None
        slabs.give(*place)
    row = slabs.window(3 * PAGE, lambda slab: True)
    assert row is not None
    assert [slab.base // PAGE for slab in row] == [4]


def test_window_goes_around_what_cannot_move() -> None:
    slabs = Slabs(PAGE)
    slabs.add_segment(0, 4 * PAGE)
    for _ in range(4):
        assert take(slabs, PAGE) is not None
    row = slabs.window(2 * PAGE, lambda slab: slab.base >= 2 * PAGE)
    assert row is not None
    assert [slab.base // PAGE for slab in row] == [2, 3]
    assert slabs.window(2 * PAGE, lambda slab: slab.base % (2 * PAGE) == 0) is None


def test_window_leaves_slabs_of_the_size_itself_alone() -> None:
    slabs = Slabs(PAGE)
    slabs.add_segment(0, 2 * PAGE)
    assert take(slabs, 2 * PAGE) is not None
    assert slabs.window(2 * PAGE, lambda slab: True) is None


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True),
    slab_pages=st.integers(1, 16),
)
def test_extents_never_overlap_and_all_memory_comes_back(
    seed: int, sizes: list[int], slab_pages: int
) -> None:
    chance = random.Random(seed)
    slabs = Slabs(slab_pages * PAGE)
    for segment, pages in enumerate((40, 24)):
        slabs.add_segment(segment, pages * PAGE)
    held: list[tuple[Slab, int]] = []
    for _ in range(120):
        if held and chance.random() < 0.45:
            slabs.give(*held.pop(chance.randrange(len(held))))
        elif place := take(slabs, chance.choice(sizes) * PAGE):
            held.append(place)
        slabs.check()
        spans = sorted((slab.segment, start((slab, at)), slab.size) for slab, at in held)
        for (segment, base, size), (other, following, _) in pairwise(spans):
            assert segment != other or base + size <= following
        assert sum(size for *_, size in spans) + slabs.free == 64 * PAGE
    for place in held:
        slabs.give(*place)
    assert slabs.free == 64 * PAGE
    assert not list(slabs.slabs())
    assert take(slabs, 40 * PAGE) is not None


@pytest.mark.parametrize("size", [PAGE, 3 * PAGE])
def test_slabs_of_a_size_grow_with_its_population(size: int) -> None:
    slabs = Slabs(48 * PAGE)
    slabs.add_segment(0, 1000 * PAGE)
    for _ in range(200 * PAGE // size):
        assert take(slabs, size) is not None
    counts = [len(slab.users) for slab in slabs.slabs()]
    assert counts[:5] == [1, 1, 2, 4, 8]
    assert max(counts) == 48 * PAGE // size


def test_window_asks_about_each_slab_once_however_many_cannot_move() -> None:
    slabs = Slabs(16 * PAGE)
    slabs.add_segment(0, 16 * 400 * PAGE)
    while take(slabs, 4 * PAGE) is not None:
        pass
    asked: list[int] = []

    def stuck(slab: Slab) -> bool:
        asked.append(id(slab))
        return False

    assert slabs.window(6 * PAGE, stuck) is None
    assert len(asked) == len(set(asked)) == len(list(slabs.slabs()))


def test_extents_lie_right_beyond_16_tib() -> None:
    """4-byte columns count slots and positions, never bytes or pages."""
    slabs = Slabs(64 << 20)
    slabs.add_segment(0, 20 << 40)
    assert slabs.carve(17 << 40) is not None
    big = slabs.take(17 << 40)
    place = take(slabs, PAGE)
    assert big is not None
    assert place is not None
    assert start(place) == 17 << 40
    slabs.check()
