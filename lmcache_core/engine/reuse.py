"""Which stored chunks a prefix hit needs, by the reuse rule of each layout group."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from lmcache_core.identity import Group
from lmcache_core.spi import Key, Reuse

Span = tuple[bytes, int, int]
"""Digest, first token and token count of one chunk."""


class Wanted(NamedTuple):
    """One value and the tokens it holds."""

    key: Key
    group: int
    first: int
    tokens: int


def needs(group: Group, spans: Sequence[Span], index: int) -> bool:
    """Tell whether a hit that ends with the last of ``spans`` needs chunk ``index`` of this group."""
    if group.reuse is Reuse.ALL:
        return True
    if group.reuse is Reuse.POINT:
        return index == len(spans) - 1
    end = spans[-1][1] + spans[-1][2]
    return spans[index][1] + spans[index][2] > end - group.window


def wanted(spans: Sequence[Span], groups: Sequence[Group], space: bytes) -> list[Wanted]:
    """Values a hit over exactly ``spans`` needs, in the order of tokens, then groups."""
    return [
        Wanted(Key(space, digest, number), number, first, count)
        for index, (digest, first, count) in enumerate(spans)
        for number, group in enumerate(groups)
        if needs(group, spans, index)
    ]


def legal_end(
    spans: Sequence[Span], groups: Sequence[Group], space: bytes, missing: AbstractSet[Key]
) -> int:
    """Most leading chunks that can be reused when the values in ``missing`` are not there."""
    end = len(spans)
    for number, group in enumerate(groups):
        if group.reuse is Reuse.ALL:
            have = (i for i, span in enumerate(spans) if Key(space, span[0], number) in missing)
            end = min(end, next(have, end))
    rest = [n for n, group in enumerate(groups) if group.reuse is not Reuse.ALL]
    while end and any(
        needs(groups[n], spans[:end], i) and Key(space, spans[i][0], n) in missing
        for n in rest
        for i in range(end)
    ):
        end -= 1
    return end
