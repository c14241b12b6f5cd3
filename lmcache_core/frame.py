"""The self-describing header in front of every stored value.

Layout, all numbers little-endian; the length is a multiple of 4096, so that header and payload form
one aligned region::

    FIXED      magic, version, header length, flags, key (space, digest, group), interior, planes,
               tokens, heads, head_dim, raw and stored payload bytes, creation time, position of the
               first token, counts, dtype, payload digest
    names      wire ids of the serde chain, then tags: u8 length and bytes each
    segments   per segment: layer u32, heads u16 u16, stored bytes u64, raw bytes u64, xxh3-128 digest
    zeros
    digest     16 bytes: xxh3-128 over every byte before it, unseeded

Segments are stored back to back, each encoded alone, so each can be read, decoded and verified alone.
Its digest proves the raw bytes; after a lossy chain, whose raw bytes nobody keeps, the stored ones.
With a chain one payload digest more covers all stored bytes, for who has no decoder.
Payload digests are seeded with the key: a value filed under another key fails even if its header
was exchanged. They guard against accident, not malice.

Nothing here allocates memory of payload size, and no length read from a header is used before it is
bounded.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import xxhash

from lmcache_core import ops
from lmcache_core.spi.errors import Corrupt
from lmcache_core.spi.keys import Key
from lmcache_core.spi.layout import Interior, KVSpec, SegmentSpec

MAGIC = b"LMCFRAME"
VERSION = 2
ALIGNMENT = 4096
HEADER_LIMIT = 1 << 20
"""Longest header accepted or written, in bytes."""
TAGS_LIMIT = 16
NO_DIGEST = bytes(16)

_START = struct.Struct("<8sHI")
_FIXED = struct.Struct("<8sHIH 32s32sH BBIII QQQq IHH 24s16s")
_SEGMENT = struct.Struct("<IHHQQ16s")
_INTERIORS = tuple(Interior)
_CHECKED_SEGMENTS = 1  # flag: the segment digests are known
_APPROXIMATE = 2  # flag: the chain is lossy, the segment digests are of stored bytes


@dataclass(frozen=True, slots=True)
class Header:
    """What a frame says of its value.

    Attributes:
        key: address of the value.
        spec: raw form of the payload.
        digests: of the raw segments in payload order, of the stored ones where ``approximate``; may be
            empty with a chain.
        chain: wire ids of the serdes applied, first one first.
        approximate: the chain is lossy.
        stored: bytes of each segment as stored, back to back behind the header.
        first: position of the chunk's first token in its prefix, -1 when the writer did not know.
        payload_digest: of the stored payload when there is a chain, else ``NO_DIGEST``.
        tags: labels of the request.
        created: Unix time in seconds, for people.
        nbytes: length of the header.
        identity: 16 bytes that stand for this very frame, for indexes and leases.
    """

    key: Key
    spec: KVSpec
    digests: tuple[bytes, ...]
    chain: tuple[str, ...]
    approximate: bool
    stored: tuple[int, ...]
    first: int
    payload_digest: bytes
    tags: tuple[str, ...]
    created: int
    nbytes: int
    identity: bytes

    @property
    def stored_nbytes(self) -> int:
        """Payload bytes behind the header."""
        return sum(self.stored)


def seed_of(key: Key, /) -> int:
    """64-bit seed that binds digests of payload bytes to a key."""
    return xxhash.xxh3_64_intdigest(key.space + key.digest + key.group.to_bytes(2, "little"))


def header_nbytes(segments: int, *, chain: Sequence[str] = (), tags: Sequence[str] = ()) -> int:
    """Header room that a value with so many segments needs, in bytes."""
    names = sum(1 + len(name.encode()) for name in (*chain, *tags))
    used = _FIXED.size + names + segments * _SEGMENT.size + 16
    return -(-used // ALIGNMENT) * ALIGNMENT


def seal(
    header: memoryview,
    key: Key,
    *,
    spec: KVSpec,
    digests: Sequence[bytes],
    chain: Sequence[str] = (),
    approximate: bool = False,
    stored: Sequence[int] = (),
    payload_digest: bytes = NO_DIGEST,
    tags: Sequence[str] = (),
    created: int = 0,
    first: int = -1,
) -> Header:
    """Write the header of a value whose digests are known, over all of ``header``.

    Args:
        header: room of a multiple of 4096 bytes, at least ``header_nbytes``.
        digests: one per segment under ``seed_of(key)``; may be empty with a chain.
        approximate, stored, payload_digest: of the encoded payload; only with a chain.

    Raises:
        ValueError: room, counts, names or sizes that no frame can carry.
    """
    chained = bool(chain)
    raw = tuple(segment.nbytes for segment in spec.segments)
    stored = tuple(stored) if chained else raw
    if header.nbytes % ALIGNMENT or not 0 < header.nbytes <= HEADER_LIMIT:
        raise ValueError(f"header room of {header.nbytes} bytes is no multiple of {ALIGNMENT}")
    if header.nbytes < (needed := header_nbytes(len(spec.segments), chain=chain, tags=tags)):
        raise ValueError(f"header room of {header.nbytes} bytes is short of {needed}")
    if not spec.segments or (len(digests) != len(spec.segments) and (digests or not chained)):
        raise ValueError(f"{len(digests)} digests for {len(spec.segments)} segments")
    if not chained and (approximate or payload_digest != NO_DIGEST):
        raise ValueError("a payload without a serde chain is covered by its segment digests")
    if len(stored) != len(raw):
        raise ValueError(f"{len(stored)} stored lengths for {len(raw)} segments")
    lengths = {len(each) for each in (*digests, payload_digest)}
    if len(tags) > TAGS_LIMIT or lengths != {16} or {len(key.space), len(key.digest)} != {32}:
        raise ValueError(f"frame of {key!r}: {len(tags)} tags, or a digest of another length")
    table = digests or [NO_DIGEST] * len(spec.segments)
    flags = (_CHECKED_SEGMENTS if digests else 0) | (_APPROXIMATE if approximate else 0)
    try:
        data = bytearray(
            _FIXED.pack(
                MAGIC,
                VERSION,
                header.nbytes,
                flags,
                *key,
                _INTERIORS.index(spec.interior),
                spec.planes,
                spec.tokens,
                spec.heads,
                spec.head_dim,
                spec.nbytes,
                sum(stored),
                created,
                first,
                len(spec.segments),
                len(chain),
                len(tags),
                _name(spec.dtype, 24),
                payload_digest,
            )
        )
        for name in (*(_name(wire_id, 15) for wire_id in chain), *map(_label, tags)):
            data += bytes([len(name)]) + name
        for segment, nbytes, digest in zip(spec.segments, stored, table, strict=True):
            begin, end = segment.head_begin, segment.head_end
            data += _SEGMENT.pack(segment.layer, begin, end, nbytes, segment.nbytes, digest)
    except struct.error as error:
        raise ValueError(f"a frame cannot carry {key!r} with {spec}: {error}") from error
    data += bytes(header.nbytes - 16 - len(data))
    identity = ops.digest(data, 0)
    header[:] = data + identity
    return Header(
        key, spec, tuple(digests), tuple(chain), approximate, stored, first, payload_digest,
        tuple(tags), created, header.nbytes, identity,
    )  # fmt: skip


def seal_value(
    header: memoryview,
    payload: memoryview,
    key: Key,
    *,
    spec: KVSpec,
    chain: Sequence[str] = (),
    approximate: bool = False,
    stored: Sequence[int] = (),
    digests: Sequence[bytes] = (),
    tags: Sequence[str] = (),
    created: int = 0,
    first: int = -1,
) -> Header:
    """``seal`` with the digests of the stored payload computed here.

    Args:
        payload: exactly the stored bytes.
        digests: of the raw segments, where a lossless chain was applied and they are known.
    """
    seed = seed_of(key)
    if chain and payload.nbytes != sum(stored):
        raise ValueError(f"payload of {payload.nbytes} bytes, {sum(stored)} expected")
    if approximate:
        digests = _digests(payload, stored, seed)
    if not chain:
        if payload.nbytes != spec.nbytes:
            raise ValueError(f"payload of {payload.nbytes} bytes, {spec.nbytes} expected")
        digests = segment_digests(payload, spec, seed)
    whole = ops.digest(payload, seed) if chain else NO_DIGEST
    return seal(
        header, key, spec=spec, digests=digests, chain=chain, approximate=approximate, stored=stored,
        payload_digest=whole, tags=tags, created=created, first=first,
    )  # fmt: skip


def segment_digests(payload: memoryview, spec: KVSpec, seed: int) -> list[bytes]:
    """Digest of each segment of a raw payload."""
    return _digests(payload, [segment.nbytes for segment in spec.segments], seed)


def _digests(payload: memoryview, lengths: Sequence[int], seed: int) -> list[bytes]:
    return [ops.digest(payload[a:b], seed) for a, b in pairwise(accumulate(lengths, initial=0))]


def length_of(view: memoryview, /) -> int:
    """Length of the header that begins in ``view``, 0 where none does; nothing is verified."""
    if view.nbytes < _START.size:
        return 0
    magic, _, nbytes = _START.unpack_from(view)
    return int(nbytes) if magic == MAGIC and nbytes <= HEADER_LIMIT else 0


def open_header(view: memoryview, expect: Key | None = None, /) -> Header:
    """Read and verify the header at the start of ``view``; the payload is not looked at.

    Args:
        expect: the key asked for; None where a scan is to find out.

    Raises:
        Corrupt: says what is wrong: length, magic, version, digest, key, or contents that do not
            add up.
    """
    if view.nbytes < _START.size:
        raise _corrupt(expect, f"{view.nbytes} bytes are too short for a header")
    magic, version, nbytes = _START.unpack_from(view)
    if magic != MAGIC:
        raise _corrupt(expect, f"does not start like a frame: {magic!r}")
    if version != VERSION:
        raise _corrupt(expect, f"frame version {version}, this is {VERSION}")
    if nbytes % ALIGNMENT or not 0 < nbytes <= min(HEADER_LIMIT, view.nbytes):
        raise _corrupt(expect, f"header length {nbytes} in {view.nbytes} bytes")
    data = bytes(view[:nbytes])  # a writer in shared memory must not change what was verified
    body, identity = memoryview(data)[:-16], data[-16:]
    if ops.digest(body, 0) != identity:
        raise _corrupt(expect, "header digest differs")
    (
        _, _, _, flags, space, digest, group, interior, planes, tokens, heads,
        head_dim, raw, stored, created, first, count, chained, tagged, dtype, payload_digest,
    ) = _FIXED.unpack_from(body)  # fmt: skip
    key = Key(space, digest, group)
    if expect is not None and key != expect:
        raise _corrupt(expect, f"holds another key: {key!r}")
    # From here on the bytes are what some writer wrote; a faulty writer is still possible.
    names, at = _names(body, chained + tagged)
    if names is None or not 0 < count * _SEGMENT.size <= body.nbytes - at:
        raise _corrupt(expect, f"header of {nbytes} bytes cannot hold {count} segments")
    rows = list(_SEGMENT.iter_unpack(body[at : at + count * _SEGMENT.size]))
    sums = sum(row[3] for row in rows), sum(row[4] for row in rows)
    if sums != (stored, raw) or (not chained and any(row[3] != row[4] for row in rows)):
        raise _corrupt(expect, f"segments do not make up a payload of {raw} bytes")
    if interior >= len(_INTERIORS) or flags not in ((0, 1, 3) if chained else (1,)):
        raise _corrupt(expect, f"unknown interior {interior} or flags {flags}")
    spec = KVSpec(
        dtype.rstrip(b"\0").decode("ascii", "replace"), tokens, planes, heads, head_dim,
        _INTERIORS[interior], tuple(SegmentSpec(r[0], r[1], r[2], r[4]) for r in rows),
    )  # fmt: skip
    return Header(
        key=key,
        spec=spec,
        digests=tuple(row[5] for row in rows) if flags & _CHECKED_SEGMENTS else (),
        chain=tuple(names[:chained]),
        approximate=bool(flags & _APPROXIMATE),
        stored=tuple(row[3] for row in rows),
        first=first,
        payload_digest=payload_digest,
        tags=tuple(names[chained:]),
        created=created,
        nbytes=nbytes,
        identity=identity,
    )


def verify(header: Header, payload: memoryview) -> None:
    """Check the stored payload, which may be followed by room that does not count.

    Raises:
        Corrupt: it is short, or a digest differs (the segment is named).
    """
    if payload.nbytes < header.stored_nbytes:
        raise _corrupt(header.key, f"{payload.nbytes} of {header.stored_nbytes} payload bytes")
    if header.chain:
        found = ops.digest(payload[: header.stored_nbytes], seed_of(header.key))
        if found != header.payload_digest:
            raise _corrupt(header.key, f"payload digest differs (encoded by {header.chain})")
    else:
        verify_raw(header, payload[: header.stored_nbytes])


def intact(view: memoryview, key: Key, identity: bytes, /) -> bool:
    """Whether a whole value is what was sealed for this key under this identity."""
    try:
        header = open_header(view, key)
        verify(header, view[header.nbytes :])
    except Corrupt:
        return False
    return header.identity == identity


def verify_raw(header: Header, raw: memoryview) -> None:
    """Check decoded bytes against the segment digests, as far as the frame knows them.

    Raises:
        Corrupt: another length, or a segment's digest differs.
    """
    if raw.nbytes != header.spec.nbytes:
        raise _corrupt(header.key, f"{raw.nbytes} of {header.spec.nbytes} raw bytes")
    if header.digests and not header.approximate:
        found = segment_digests(raw, header.spec, seed_of(header.key))
        for index, (have, want) in enumerate(zip(found, header.digests, strict=True)):
            if have != want:
                raise _corrupt(header.key, f"digest of segment {index} differs")


def verify_segment(header: Header, index: int, view: memoryview) -> None:
    """Check one segment that was read alone: as decoded, or as stored where ``approximate``.

    Raises:
        Corrupt: another length, another digest, or a frame that does not know the segment's digest.
    """
    raw = header.spec.segments[index].nbytes
    if view.nbytes != (header.stored[index] if header.approximate else raw) or not header.digests:
        raise _corrupt(header.key, f"segment {index} cannot be verified by {view.nbytes} bytes")
    if ops.digest(view, seed_of(header.key)) != header.digests[index]:
        raise _corrupt(header.key, f"digest of segment {index} differs")


def _names(header: memoryview, count: int) -> tuple[list[str] | None, int]:
    """Length-prefixed names behind the fixed part and where they end; None when they run over."""
    found, at = [], _FIXED.size
    for _ in range(count):
        if at >= header.nbytes or at + 1 + header[at] > header.nbytes:
            return None, at
        found.append(bytes(header[at + 1 : at + 1 + header[at]]).decode("utf-8", "replace"))
        at += 1 + header[at]
    return found, at


def _name(text: str, limit: int) -> bytes:
    if not text.isascii() or not 1 <= len(text) <= limit:
        raise ValueError(f"{text!r} is not 1 to {limit} ASCII characters")
    return text.encode("ascii")


def _label(text: str) -> bytes:
    label = text.encode()
    if not 1 <= len(label) <= 255:
        raise ValueError(f"tag {text[:40]!r} has {len(label)} bytes, 1 to 255 fit")
    return label


def _corrupt(key: Key | None, reason: str) -> Corrupt:
    return Corrupt(f"{key!r}: {reason}" if key else reason, operation="load")
