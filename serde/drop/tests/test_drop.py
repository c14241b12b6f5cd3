"""Which tokens stay."""

from __future__ import annotations

import numpy as np
import pytest
from lmcache_serde_drop import Drop, DropOptions

from lmcache_core.spi import ConfigError, Interior, Key, KVSpec, SegmentSpec, ValueInfo

TOKENS, HEADS, DIM = 16, 2, 4


def info_at(first: int, *, planes: int = 2) -> ValueInfo:
    nbytes = 4 * planes * TOKENS * HEADS * DIM
    segment = SegmentSpec(3, 0, HEADS, nbytes)
    spec = KVSpec("float32", TOKENS, planes, HEADS, DIM, Interior.ROWS, (segment,))
    return ValueInfo(Key(bytes(32), bytes(32), 0), spec, first)


def through(serde: Drop, rows: np.ndarray, first: int) -> np.ndarray:
    """Encoded and decoded."""
    info = info_at(first)
    into = memoryview(bytearray(serde.bound(info.spec)))
    length = serde.encode(info, memoryview(rows.tobytes()), into)
    back = bytearray(rows.nbytes)
    serde.decode(info, into[:length], memoryview(back))
    return np.frombuffer(back, np.float32).reshape(rows.shape)


def kept(rows: np.ndarray) -> list[int]:
    return np.flatnonzero(rows.any((0, 2))).tolist()


def rows_of(unlike: list[int]) -> np.ndarray:
    """Keys that point one way, but for these tokens'."""
    rows = np.ones((2, TOKENS, HEADS * DIM), np.float32)
    rows[0, unlike, ::2] = -1
    return rows


def test_the_latest_tokens_and_those_with_unlike_keys_stay_where_they_are() -> None:
    rows = rows_of([2, 5, 8])
    found = through(Drop(DropOptions(keep=5 / 16, recent=2)), rows, 256)
    assert kept(found) == [2, 5, 8, 14, 15]
    assert (found[:, kept(found)] == rows[:, kept(found)]).all()


def test_the_first_tokens_of_a_prompt_are_left_to_who_keeps_them_exact() -> None:
    serde = Drop(DropOptions(keep=0.25, recent=0))
    assert kept(through(serde, rows_of([0, 1, 7, 9]), 16)) == [0, 1, 7, 9]
    assert kept(through(serde, rows_of([0, 1, 7, 9]), 0)) == [4, 5, 7, 9]


def test_every_layer_keeps_as_many_and_what_is_gone_stays_gone() -> None:
    draw = np.random.default_rng(5)
    serde = Drop(DropOptions(keep=0.4, recent=3))
    for first in (0, 16):
        once = [
            through(serde, draw.normal(size=(2, TOKENS, HEADS * DIM)).astype(np.float32), first)
            for _ in range(5)
        ]
        assert len({len(kept(each)) for each in once}) == 1
        assert all((through(serde, each, first) == each).all() for each in once)


def test_what_has_no_keys_beside_its_values_or_is_not_finite_is_declined() -> None:
    serde = Drop(DropOptions())
    room = memoryview(bytearray(4096))
    with pytest.raises(ValueError, match="keys and values of a token"):
        serde.encode(info_at(0, planes=1), memoryview(bytes(512)), room)
    rows = rows_of([])
    rows[0, 15, 0] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        serde.encode(info_at(0), memoryview(rows.tobytes()), room)


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": 1.5}, {"recent": -1}])
def test_shares_and_counts_have_bounds(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        DropOptions(**options)  # type: ignore[arg-type]
