"""Names of chunks: a hash chain over token ids and over everything else that enters at a position.

``d[i] = SHA256(CHUNK_TAG || d[i-1] || u32le(count) || ids as u32le || u32le(m) || m extras)`` with
``d[-1] = KeySpace.root``. One extra is ``u8(len) kind || u8(len) digest || i64le(where) ||
u64le(end - begin)``, ``where = begin - first token of the chunk``; extras are ordered by (begin, end,
kind, digest). So a chunk names its whole prefix, and a picture changes the chunks it touches and all
later ones, but none before it.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from lmcache_core import ops
from lmcache_core.identity.canonical import Unkeyable
from lmcache_core.identity.space import EXACT, FORMAT, Group, KeySpace
from lmcache_core.spi.keys import DIGEST_NBYTES, Key
from lmcache_core.spi.layout import Interior, Reuse

ROWS_TAG = b"lmcache.rows\x00"
Tokens = Sequence[int] | memoryview
"""Ids as integers, or a buffer; one of bytes or of uint32 items is taken as packed u32le."""


@dataclass(frozen=True, slots=True)
class Extra:
    """Something besides token ids that shapes the KV of positions [begin, end) and later.

    Attributes:
        kind: what it is (``"media"``, ``"embedding"`` ...), 1 to 255 ASCII characters. Data chosen
            by a caller has a kind of its own, so that it can never pose as another input.
        digest: 16 to 64 bytes of its content, never a shortened one.
        begin, end: token positions in the prompt; an empty range takes effect from ``begin`` on.
    """

    kind: str
    digest: bytes
    begin: int
    end: int

    def __post_init__(self) -> None:
        if not (self.kind.isascii() and 1 <= len(self.kind) <= 255):
            raise Unkeyable(f"kind of an extra is 1 to 255 ASCII characters, got {self.kind!r:.40}")
        digest: object = self.digest
        if not isinstance(digest, bytes) or not 16 <= len(digest) <= 64:
            raise Unkeyable(f"digest of a {self.kind!r} extra is 16 to 64 bytes of its content")
        if not 0 <= self.begin <= self.end < 1 << 63:
            raise Unkeyable(
                f"{self.kind!r} extra covers impossible tokens {self.begin}..{self.end}"
            )

    def encode(self, start: int) -> bytes:
        """Hashed form inside the chunk whose first token has position ``start``."""
        where = struct.pack("<qQ", self.begin - start, self.end - self.begin)
        kind = self.kind.encode("ascii")
        return bytes([len(kind)]) + kind + bytes([len(self.digest)]) + self.digest + where


class Chain:
    """Digests of one token sequence that may grow, as a request does while decoding.

    Attributes:
        chunk_tokens: tokens per chunk.
        digests: of all full chunks so far.
    """

    __slots__ = ("_extras", "_root", "_tail", "chunk_tokens", "digests")

    def __init__(self, root: bytes, chunk_tokens: int, *, extras: Iterable[Extra] = ()) -> None:
        if len(root) != DIGEST_NBYTES or chunk_tokens < 1:
            raise Unkeyable(f"no chain of {chunk_tokens}-token chunks from {len(root)} root bytes")
        self.chunk_tokens = chunk_tokens
        self.digests: list[bytes] = []
        self._root = root
        self._tail = b""
        self._extras = list(extras)

    @property
    def tokens(self) -> int:
        """Tokens so far."""
        return len(self.digests) * self.chunk_tokens + len(self._tail) // 4

    def extend(self, tokens: Tokens, *, extras: Iterable[Extra] = ()) -> list[bytes]:
        """Append ids and return the digests of the chunks that became full.

        Args:
            extras: further ones; positions count from the start of the prompt.

        Raises:
            Unkeyable: an id outside [0, 2**32) (a placeholder, an unconfirmed token), or an extra
                that begins in a chunk whose digest was given out. Nothing has changed then.
        """
        added = list(extras)
        closed = len(self.digests)
        for extra in added:
            if extra.begin < closed * self.chunk_tokens:
                raise Unkeyable(
                    f"{extra.kind!r} extra at token {extra.begin} comes too late: "
                    f"{closed} chunks of {self.chunk_tokens} are named already"
                )
        data = memoryview(self._tail + _packed(tokens) if self._tail else _packed(tokens))
        self._extras += added
        full = closed + len(data) // (4 * self.chunk_tokens)
        keyed = self._overlaps(closed, full)
        at = closed
        for index in [*sorted(keyed), full]:
            if at < index:
                ids = self._ids(data, at - closed, index - closed)
                run = ops.chain(self._last(), ids, self.chunk_tokens)
                self.digests += [
                    run[i : i + DIGEST_NBYTES] for i in range(0, len(run), DIGEST_NBYTES)
                ]
            if index < full:
                ids = self._ids(data, index - closed, index - closed + 1)
                self.digests.append(self._hash(ids, keyed[index], index))
            at = index + 1
        self._tail = bytes(data[(full - closed) * 4 * self.chunk_tokens :])
        done = full * self.chunk_tokens
        self._extras = [extra for extra in self._extras if extra.end > done or extra.begin >= done]
        return self.digests[closed:]

    def partial(self) -> bytes | None:
        """Digest of the chunk begun but not full, or None. Unlike that of the full chunk."""
        if not self._tail:
            return None
        index = len(self.digests)
        here = [extra for extra in self._extras if extra.begin < self.tokens]
        return self._hash(memoryview(self._tail), here, index)

    def _last(self) -> bytes:
        return self.digests[-1] if self.digests else self._root

    def _ids(self, data: memoryview, first: int, end: int) -> memoryview:
        return data[4 * first * self.chunk_tokens : 4 * end * self.chunk_tokens]

    def _overlaps(self, first: int, end: int) -> dict[int, list[Extra]]:
        found: dict[int, list[Extra]] = {}
        for extra in self._extras:
            last = max(extra.begin, extra.end - 1) // self.chunk_tokens
            for index in range(max(first, extra.begin // self.chunk_tokens), min(last + 1, end)):
                found.setdefault(index, []).append(extra)
        return found

    def _hash(self, ids: memoryview, extras: list[Extra], index: int) -> bytes:
        ordered = sorted(extras, key=lambda e: (e.begin, e.end, e.kind, e.digest))
        start = index * self.chunk_tokens
        state = hashlib.sha256(ops.CHUNK_TAG + self._last() + struct.pack("<I", len(ids) // 4))
        state.update(ids)
        state.update(struct.pack("<I", len(ordered)) + b"".join(e.encode(start) for e in ordered))
        return state.digest()


def chunk_digests(
    root: bytes,
    tokens: Tokens,
    chunk_tokens: int,
    *,
    extras: Iterable[Extra] = (),
    partial: bool = False,
) -> list[bytes]:
    """Digests of the full chunks of a prompt; with ``partial`` also of a last, shorter one.

    Raises:
        Unkeyable: see ``Chain.extend``.
    """
    chain = Chain(root, chunk_tokens, extras=extras)
    digests = chain.extend(tokens)
    last = chain.partial() if partial else None
    return digests if last is None else [*digests, last]


def keys(space: KeySpace | bytes, digests: Iterable[bytes], group: int = 0) -> list[Key]:
    """Keys of the given chunks in one layout group; ``space`` may be given as its digest."""
    digest = space if isinstance(space, bytes) else space.digest
    return [Key(digest, each, group) for each in digests]


def embedding_extras(
    rows: memoryview, row_nbytes: int, begin: int, *, dtype: str, chunk_tokens: int
) -> list[Extra]:
    """Extras for prompt embeddings, cut at chunk borders so that equal beginnings stay equal.

    Args:
        rows: one embedding row per token, contiguous.
        row_nbytes: bytes of one row.
        begin: token position of the first row.
        dtype: element type of the rows.

    Raises:
        Unkeyable: the rows are not whole.
    """
    flat = rows.cast("B") if rows.nbytes else rows
    if row_nbytes < 1 or flat.nbytes % row_nbytes:
        raise Unkeyable(f"{flat.nbytes} bytes of embeddings are no multiple of {row_nbytes}")
    end = begin + flat.nbytes // row_nbytes
    head = ROWS_TAG + struct.pack("<IQ", len(dtype), row_nbytes) + dtype.encode("ascii")
    found = []
    while begin < end:
        stop = min(end, (begin // chunk_tokens + 1) * chunk_tokens)
        piece, flat = flat[: (stop - begin) * row_nbytes], flat[(stop - begin) * row_nbytes :]
        state = hashlib.sha256(head)
        state.update(piece)
        found.append(Extra("embedding", state.digest(), begin, stop))
        begin = stop
    return found


@cache
def probe_digest() -> bytes:
    """Digest that exercises every rule here; peers that disagree on it must not share anything."""
    rows = Group(
        reuse=Reuse.ALL, window=0, tokens_per_chunk=4, layers=(0, 2), heads=8, head_range=(0, 8),
        head_dim=128, planes=2, dtype="bfloat16", interior=Interior.ROWS,
        page_size=None, encoding=None, engine=None,
    )  # fmt: skip
    state = replace(
        rows, reuse=Reuse.POINT, layers=(1,), interior=Interior.STATE,
        page_size=4, encoding="probe", engine="probe",
    )  # fmt: skip
    space = KeySpace(
        format=FORMAT, model="prob\u00e9", weights=bytes(range(32)), epoch=1,
        kv_dtype="bfloat16", scales="none", rope=(), groups=(rows, state), adapter=None, tenant="",
        fidelity=EXACT, tags_in_key=(("b", "1"), ("a", "2")),
        fields=(("number", 0.5), ("flag", True)),
    )  # fmt: skip
    media = Extra("media", bytes(32), 6, 9)
    return chunk_digests(space.root, range(1, 15), 4, extras=[media], partial=True)[-1]


def _packed(tokens: Tokens) -> bytes:
    """Ids as u32le; signed or wide buffers go through the checked path."""
    if isinstance(tokens, bytes | bytearray | memoryview):
        view = memoryview(tokens)
        if view.format in _PACKED and view.itemsize in (1, 4):
            if view.nbytes % 4:
                raise Unkeyable(f"{view.nbytes} bytes are no whole number of packed token ids")
            return view.tobytes()
        tokens = view.tolist()
    try:
        return ops.pack_tokens(tokens)
    except (TypeError, ValueError) as error:
        raise Unkeyable(f"cannot name the token ids: {error}") from error


_PACKED = ("B", "b", "c", "<I", *(("I", "L") if sys.byteorder == "little" else ()))
