"""Engine memory without a model: the KV of a position depends on every token up to it, as a model's does."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

from lmcache_core import ops
from lmcache_core.identity import FORMAT, Group, KeySpace
from lmcache_core.spi import Interior, Reuse

CHUNK, ROW = 4, 16


def group(layers: tuple[int, ...]) -> Group:
    return Group(
        reuse=Reuse.ALL, window=0, tokens_per_chunk=CHUNK, layers=layers, heads=1, head_range=(0, 1),
        head_dim=4, planes=1, dtype="float32", interior=Interior.ROWS, page_size=None,
        encoding=None, engine=None,
    )  # fmt: skip


GROUPS = (group((0, 1)), group((2,)))
WIDTH = 3 * ROW


@lru_cache(8)
def space(groups: int, salt: str = "") -> KeySpace:
    return KeySpace(
        format=FORMAT, model="none", weights=bytes(32), epoch=0, kv_dtype="float32", scales="none",
        rope=(), groups=GROUPS[:groups], adapter=None, tenant=salt, fidelity="exact",
        tags_in_key=(), fields=(),
    )  # fmt: skip


@lru_cache(1 << 14)
def rows(tokens: tuple[int, ...]) -> bytes:
    """The only right KV of the last of these tokens, all layers."""
    return hashlib.shake_128(repr(tokens).encode()).digest(WIDTH)


class Rows:
    """Memory of one request (a ``Surface``)."""

    def __init__(self, groups: int, tokens: Sequence[int]) -> None:
        self.groups = GROUPS[:groups]
        self.tokens = tuple(tokens)
        self.rows = [bytearray(b"\xaa" * WIDTH) for _ in tokens]

    def compute(self, first: int) -> None:
        for at in range(first, len(self.tokens)):
            self.rows[at][:] = rows(self.tokens[: at + 1])

    def pack(
        self, group: int, first: int, count: int, into: memoryview, seed: int, /
    ) -> Sequence[bytes]:
        digests, at = [], 0
        for layer in self.groups[group].layers:
            begin = at
            for each in self.rows[first : first + count]:
                into[at : at + ROW] = each[layer * ROW : (layer + 1) * ROW]
                at += ROW
            digests.append(ops.digest(into[begin:at], seed))
        return digests

    def unpack(
        self, group: int, first: int, count: int, source: memoryview, seed: int,
        digests: Sequence[bytes], /,
    ) -> bool:  # fmt: skip
        at, good = 0, True
        for index, layer in enumerate(self.groups[group].layers):
            begin = at
            for each in self.rows[first : first + count]:
                each[layer * ROW : (layer + 1) * ROW] = source[at : at + ROW]
                at += ROW
            good &= not digests or ops.digest(source[begin:at], seed) == digests[index]
        return good

    def wrong(self, good: int) -> list[int]:
        """Positions among the first ``good`` whose KV is not theirs."""
        part = slice(0, (len(self.groups) + 1) * ROW)
        return [
            at for at in range(good) if self.rows[at][part] != rows(self.tokens[: at + 1])[part]
        ]
