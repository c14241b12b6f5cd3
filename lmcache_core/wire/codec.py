"""Records as bytes, and keys and extents as the records carry them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial, reduce
from itertools import groupby, repeat
from operator import or_

import msgspec

from lmcache_core.spi.buffers import Extent
from lmcache_core.spi.keys import Key
from lmcache_core.wire import records, replies
from lmcache_core.wire.records import MOST_KEYS, Record, Run

LENGTH = struct.Struct("<I")
"""What stands in front of every record."""

Reply = (
    replies.Welcome | replies.Mapped | replies.Registered | replies.Found | replies.Granted
    | replies.Reserved | replies.Committed | replies.Count | replies.Document | replies.Values
    | replies.Changed | replies.Metered | replies.Done | replies.Failed
)  # fmt: skip
Notice = replies.Ready | replies.Revoke | replies.Boot
ONE_WAY = (records.Dispatch, records.Release, records.Abort, records.Prefill)
NOTICES = (replies.Ready, replies.Revoke, replies.Boot)

_NO_LENGTH = bytes(LENGTH.size)
_encoder = msgspec.msgpack.Encoder()
_REQUESTS = [
    kind
    for kind in vars(records).values()
    if isinstance(kind, type) and issubclass(kind, Record) and kind not in (Record, records.Message)
]
decode_request: Callable[[memoryview | bytes], Record] = msgspec.msgpack.Decoder(
    reduce(or_, _REQUESTS), strict=True
).decode
decode_reply = msgspec.msgpack.Decoder(Reply | Notice, strict=True).decode
DecodeError = msgspec.DecodeError
_key = partial(tuple.__new__, Key)  # a named tuple's own constructor is four times as slow


def frame(record: Record, /) -> bytearray:
    """A record as it goes over the wire."""
    return frames((record,))


def frames(records: Iterable[Record], /) -> bytearray:
    """Several records, back to back."""
    buffer = bytearray()
    for record in records:
        begin = len(buffer)
        buffer += _NO_LENGTH
        _encoder.encode_into(record, buffer, -1)
        LENGTH.pack_into(buffer, begin, len(buffer) - begin - LENGTH.size)
    return buffer


def to_runs(keys: Sequence[Key], /) -> list[Run]:
    """Keys in their order, neighbours of one space and group together."""
    if not keys:
        return []
    spaces, digests, groups = zip(*keys, strict=True)
    count = len(keys)
    if spaces.count(spaces[0]) == count and groups.count(groups[0]) == count:
        return [Run(spaces[0], groups[0], b"".join(digests))]
    return [
        Run(space, group, b"".join([key.digest for key in part]))
        for (space, group), part in groupby(keys, key=lambda key: (key.space, key.group))
    ]


def to_keys(runs: Iterable[Run], /) -> list[Key]:
    """Inverse of ``to_runs``.

    Raises:
        ValueError: digests that are not whole, or more than ``MOST_KEYS`` keys.
    """
    keys: list[Key] = []
    for run in runs:
        digests = run.digests
        if len(digests) % 32:
            raise ValueError(f"{len(digests)} bytes are no 32-byte digests")
        parts = _digests(len(digests) // 32).unpack(digests)
        keys += map(_key, zip(repeat(run.space), parts, repeat(run.group)))
    if len(keys) > MOST_KEYS:
        raise ValueError(f"{len(keys)} keys in one request, at most {MOST_KEYS}")
    return keys


@lru_cache(64)
def _digests(count: int) -> struct.Struct:
    return struct.Struct("32s" * count)


def to_extents(packed: bytes, /) -> list[Extent]:
    """What ``Granted`` and ``Reserved`` pack as u64, little-endian.

    Raises:
        ValueError: not whole extents.
    """
    if len(packed) % 32:
        raise ValueError(f"{len(packed)} bytes are no extents")
    return [Extent(s, b, n, g) for s, b, n, g in struct.iter_unpack("<4Q", packed)]
