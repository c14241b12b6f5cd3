"""The self-describing header in front of every stored value.

Layout, all numbers little-endian; the length is a multiple of 4096, so that header and payload form
one aligned region::

    FIXED      magic, version, header length, flags, key (space, digest, group), interior, planes,
    tokens,
               heads, head_dim, raw and stored payload bytes, creation time, counts, dtype, payload
               digest
    names      wire ids of the serde chain, then tags: u8 length and bytes each
    segments   per segment: layer u32, heads u16 u16, offset u64, bytes u64, xxh3-128 digest
    zeros
    digest     16 bytes: xxh3-128 over every byte before it, unseeded

The segment table describes the raw payload. Without a chain the stored payload *is* the raw one:
each segment can be read and verified alone. With a chain the stored bytes are covered by one
payload digest, and the table's digests, where the writer knew them, prove the decoded bytes.
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
VERSION = 1
ALIGNMENT = 4096
HEADER_LIMIT = 1 << 20
"""Longest header accepted or written, in bytes."""
TAGS_LIMIT = 16
NO_DIGEST = bytes(16)

_START = struct.Struct("<8sHI")
_FIXED = struct.Struct("<8sHIH 32s32sH BBIII QQQ IHH 24s16s")
_SEGMENT = struct.Struct("<IHHQQ16s")
_INTERIORS = tuple(Interior)
_CHECKED_SEGMENTS = 1  # flag: the segment digests are known


@dataclass(frozen=True, slots=True)
class Header:
    """What a frame says of its value.

    Attributes:
        key: address of the value.
        spec: raw form of the payload.
        digests: of the raw segments in payload order; empty when a serde chain hides them.
        chain: wire ids of the serdes applied, first one first.
        stored_nbytes: payload bytes behind the header.
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
    stored_nbytes: int
    payload_digest: bytes
    tags: tuple[str, ...]
    created: int
    nbytes: int
    identity: bytes


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
    stored_nbytes: int | None = None,
    payload_digest: bytes = NO_DIGEST,
    tags: Sequence[str] = (),
    created: int = 0,
) -> Header:
    """Write the header of a value whose digests are known, over all of ``header``.

    Args:
        header: room of a multiple of 4096 bytes, at least ``header_nbytes``.
        digests: one per segment under ``seed_of(key)``; may be empty with a chain.
        stored_nbytes, payload_digest: of the encoded payload; only with a chain.

    Raises:
        ValueError: room, counts, names or sizes that no frame can carry.
    """
    chained = bool(chain)
    stored = spec.nbytes if stored_nbytes is None else stored_nbytes
    if header.nbytes % ALIGNMENT or not 0 < header.nbytes <= HEADER_LIMIT:
        raise ValueError(f"header room of {header.nbytes} bytes is no multiple of {ALIGNMENT}")
    if header.nbytes < (needed := header_nbytes(len(spec.segments), chain=chain, tags=tags)):
        raise ValueError(f"header room of {header.nbytes} bytes is short of {needed}")
    if not spec.segments or (len(digests) != len(spec.segments) and (digests or not chained)):
        raise ValueError(f"{len(digests)} digests for {len(spec.segments)} segments")
    if not chained and (stored != spec.nbytes or payload_digest != NO_DIGEST):
        raise ValueError("a payload without a serde chain is covered by its segment digests")
    lengths = {len(each) for each in (*digests, payload_digest)}
    if len(tags) > TAGS_LIMIT or lengths != {16} or {len(key.space), len(key.digest)} != {32}:
        raise ValueError(f"frame of {key!r}: {len(tags)} tags, or a digest of another length")
    table = digests or [NO_DIGEST] * len(spec.segments)
    offsets = accumulate((segment.nbytes for segment in spec.segments), initial=0)
    try:
        data = bytearray(
            _FIXED.pack(
                MAGIC,
                VERSION,
                header.nbytes,
                _CHECKED_SEGMENTS if digests else 0,
                *key,
                _INTERIORS.index(spec.interior),
                spec.planes,
                spec.tokens,
                spec.heads,
                spec.head_dim,
                spec.nbytes,
                stored,
                created,
                len(spec.segments),
                len(chain),
                len(tags),
                _name(spec.dtype, 24),
                payload_digest,
            )
        )
        for name in (*(_name(wire_id, 15) for wire_id in chain), *map(_label, tags)):
            data += bytes([len(name)]) + name
        for segment, offset, digest in zip(spec.segments, offsets, table, strict=False):
            begin, end = segment.head_begin, segment.head_end
            data += _SEGMENT.pack(segment.layer, begin, end, offset, segment.nbytes, digest)
    except struct.error as error:
        raise ValueError(f"a frame cannot carry {key!r} with {spec}: {error}") from error
    data += bytes(header.nbytes - 16 - len(data))
    identity = ops.digest(data, 0)
    header[:] = data + identity
    return Header(
        key, spec, tuple(digests), tuple(chain), stored, payload_digest, tuple(tags), created,
        header.nbytes, identity,
    )  # fmt: skip


def seal_value(
    header: memoryview,
    payload: memoryview,
    key: Key,
    *,
    spec: KVSpec,
    chain: Sequence[str] = (),
    digests: Sequence[bytes] = (),
    tags: Sequence[str] = (),
    created: int = 0,
) -> Header:
    """``seal`` with the digests of the stored payload computed here.

    Args:
        payload: exactly the stored bytes.
        digests: of the raw segments, where a lossless chain was applied and they are known.
    """
    seed = seed_of(key)
    if not chain:
        if payload.nbytes != spec.nbytes:
            raise ValueError(f"payload of {payload.nbytes} bytes, {spec.nbytes} expected")
        digests = segment_digests(payload, spec, seed)
    whole = ops.digest(payload, seed) if chain else NO_DIGEST
    return seal(
        header, key, spec=spec, digests=digests, chain=chain, stored_nbytes=payload.nbytes,
        payload_digest=whole, tags=tags, created=created,
    )  # fmt: skip


def segment_digests(payload: memoryview, spec: KVSpec, seed: int) -> list[bytes]:
    """Digest of each segment of a raw payload."""
    ends = list(accumulate((segment.nbytes for segment in spec.segments), initial=0))
    return [ops.digest(payload[a:b], seed) for a, b in pairwise(ends)]


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
        head_dim, raw, stored, created, count, chained, tagged, dtype, payload_digest,
    ) = _FIXED.unpack_from(body)  # fmt: skip
    key = Key(space, digest, group)
    if expect is not None and key != expect:
        raise _corrupt(expect, f"holds another key: {key!r}")
    # From here on the bytes are what some writer wrote; a faulty writer is still possible.
    names, at = _names(body, chained + tagged)
    if names is None or not 0 < count * _SEGMENT.size <= body.nbytes - at:
        raise _corrupt(expect, f"header of {nbytes} bytes cannot hold {count} segments")
    rows = list(_SEGMENT.iter_unpack(body[at : at + count * _SEGMENT.size]))
    ends = list(accumulate((row[4] for row in rows), initial=0))
    if [row[3] for row in rows] != ends[:-1] or ends[-1] != raw or (not chained and stored != raw):
        raise _corrupt(expect, f"segments do not make up a payload of {raw} bytes")
    if interior >= len(_INTERIORS) or not (chained or flags & _CHECKED_SEGMENTS):
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
        stored_nbytes=stored,
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


def verify_raw(header: Header, raw: memoryview) -> None:
    """Check decoded bytes against the segment digests, as far as the frame knows them.

    Raises:
        Corrupt: another length, or a segment's digest differs.
    """
    if raw.nbytes != header.spec.nbytes:
        raise _corrupt(header.key, f"{raw.nbytes} of {header.spec.nbytes} raw bytes")
    if header.digests:
        found = segment_digests(raw, header.spec, seed_of(header.key))
        for index, (have, want) in enumerate(zip(found, header.digests, strict=True)):
            if have != want:
                raise _corrupt(header.key, f"digest of segment {index} differs")


def verify_segment(header: Header, index: int, view: memoryview) -> None:
    """Check one raw segment that was read alone.

    Raises:
        Corrupt: another length, another digest, or a frame that does not know the segment's digest.
    """
    if view.nbytes != header.spec.segments[index].nbytes or not header.digests:
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
