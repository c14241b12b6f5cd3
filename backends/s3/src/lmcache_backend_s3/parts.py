"""Long values in several requests at once: how a load is cut, and what its pieces amount to."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from lmcache_backend_s3.transport import Call
from lmcache_core.spi import (
    MISSED,
    BufferTooSmall,
    Corrupt,
    Load,
    Loaded,
    LoadStatus,
    Store,
    Unavailable,
    section,
)


@dataclass(slots=True, eq=False)
class Whole:
    """What the pieces of one load have in common."""

    load: Load
    seen: tuple[int, str] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def wanted(self, total: int, etag: str, /) -> int:
        """Bytes that the load is to fill from an object of ``total`` bytes.

        Raises:
            Corrupt, BufferTooSmall: see law B7.
            Unavailable: another piece has seen another version.
        """
        load = self.load
        end = total if load.length is None else load.offset + load.length
        if not 0 <= load.offset <= end <= total:
            raise Corrupt(f"{load.key!r} has {total} bytes, asked for {load.offset}..{end}")
        if load.room < end - load.offset:
            raise BufferTooSmall(
                f"{load.key!r} needs {end - load.offset} bytes, the buffers have {load.room}"
            )
        with self.lock:
            if (self.seen or (total, etag)) != (total, etag):
                raise Unavailable(f"{load.key!r} changed while it was read")
            self.seen = total, etag
        return end - load.offset


@dataclass(frozen=True, slots=True)
class Piece(Load):
    """A load, or the part of it that begins ``skip`` bytes behind its begin, on its way to a thread."""

    call: Call = field(kw_only=True)
    whole: Whole = field(kw_only=True)
    skip: int = field(kw_only=True, default=0)

    def views(self, total: int, etag: str, /) -> Sequence[memoryview]:
        """The part of the buffers that is to be filled."""
        return section(self.into, 0, max(0, self.whole.wanted(total, etag) - self.skip))


@dataclass(frozen=True, slots=True)
class Upload(Store):
    """A store on its way to a thread."""

    call: Call = field(kw_only=True)


def cut(load: Load, call: Call, size: int, most: int, /) -> list[Piece]:
    """Pieces of ``size`` bytes or more, at most ``most`` of them; one where that makes less than two."""
    room = load.room if load.length is None else min(load.room, load.length)
    count = min(most, room // size)
    whole = Whole(load)
    if count < 2:
        return [Piece(load.key, load.into, load.offset, load.length, call=call, whole=whole)]
    step = -(-room // count)
    return [
        Piece(
            load.key, section(load.into, at, step), load.offset + at, min(step, room - at),
            call=call, whole=whole, skip=at,
        )
        for at in range(0, room, step)
    ]  # fmt: skip


def joined(results: Sequence[Loaded], /) -> Loaded:
    """What the results of the pieces say of the load."""
    for status in (LoadStatus.FAILED, LoadStatus.MISSED):
        for result in results:
            if result.status is status:
                return MISSED if status is LoadStatus.MISSED else result
    return Loaded.filled(sum(result.nbytes for result in results))
