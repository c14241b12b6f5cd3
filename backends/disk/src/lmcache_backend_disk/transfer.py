"""Whole transfers between a file and a list of views: short ones go on, unaligned ones bounce.

A direct transfer (``O_DIRECT``) needs offsets, lengths and addresses that are multiples of the block of the
device. Views of the arena are; of the rest only the odd end of the last view passes through ``scratch``,
and everything does when lengths or addresses are wrong. Addresses are not computed: the kernel says EINVAL.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from lmcache_core import ops
from lmcache_core.spi import Files

BLOCK = 4096
STALLS = 8
"""Transfers without progress before giving up. A short one that ends inside a block starts the block anew."""


def read_into(
    files: Files,
    descriptor: int,
    views: Sequence[memoryview],
    *,
    offset: int,
    scratch: memoryview | None,
) -> int:
    """Fill ``views`` from ``offset`` on and return how many bytes there were.

    Args:
        scratch: page-aligned memory of a multiple of ``BLOCK`` for a descriptor opened with ``O_DIRECT``,
            else None.
    """
    total, done, stalls = _nbytes(views), 0, 0
    while done < total and stalls < STALLS:
        rest, at = _slice(views, done), offset + done
        if scratch is None:
            moved = files.preadv(descriptor, rest, at)
        else:
            moved = _read_direct(files, descriptor, rest, at=at, scratch=scratch)
        stalls += moved == 0
        done += moved
    return done


def write_from(
    files: Files, descriptor: int, views: Sequence[memoryview], *, scratch: memoryview | None
) -> None:
    """Write ``views`` to an empty file and give it exactly their length. ``scratch`` as in ``read_into``."""
    total, done, stalls = _nbytes(views), 0, 0
    while done < total:
        if scratch is None:
            moved = files.pwritev(descriptor, _slice(views, done), done)
        else:
            moved = _write_direct(files, descriptor, views, done=done, scratch=scratch)
        stalls += moved <= 0
        if stalls == STALLS:
            raise OSError(errno.EIO, "write made no progress")
        done += max(0, moved)
    if scratch is not None and total % BLOCK:
        files.truncate(descriptor, total)


def same_bytes(
    files: Files, descriptor: int, views: Sequence[memoryview], *, scratch: memoryview, direct: bool
) -> bool:
    """Read a file back and compare."""
    total, done, half = _nbytes(views), 0, len(scratch) // 2
    bounce = scratch[half:] if direct else None
    while done < total:
        piece = scratch[: min(half, total - done)]
        if read_into(files, descriptor, [piece], offset=done, scratch=bounce) < len(piece):
            return False
        at = 0
        for view in _slice(views, done):
            part = view[: len(piece) - at]
            if ops.digest(part, 0) != ops.digest(piece[at : at + len(part)], 0):
                return False
            at += len(part)
        done += len(piece)
    return True


def _read_direct(
    files: Files,
    descriptor: int,
    rest: Sequence[memoryview],
    *,
    at: int,
    scratch: memoryview,
) -> int:
    wanted = _nbytes(rest)
    if _aligned(rest, at):
        body, last = _split(rest)
        tail = scratch[:BLOCK] if len(last) else scratch[:0]
        try:
            moved = files.preadv(descriptor, [*body, tail] if len(tail) else body, at)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            odd = max(0, min(moved - _nbytes(body), len(last)))
            last[:odd] = tail[:odd]
            return min(moved, wanted)
    skip = at % BLOCK
    room = min(len(scratch), -(-(skip + wanted) // BLOCK) * BLOCK)
    moved = files.preadv(descriptor, [scratch[:room]], at - skip)
    got = max(0, min(moved - skip, wanted))
    done = 0
    for view in rest:
        part = view[: got - done]
        part[:] = scratch[skip + done : skip + done + len(part)]
        done += len(part)
    return got


def _write_direct(
    files: Files,
    descriptor: int,
    views: Sequence[memoryview],
    *,
    done: int,
    scratch: memoryview,
) -> int:
    total = _nbytes(views)
    rest = _slice(views, done)
    if _aligned(rest, done):
        body, last = _split(rest)
        tail = scratch[:0]
        if len(last):
            tail = scratch[:BLOCK]
            tail[: len(last)] = last
            tail[len(last) :] = bytes(BLOCK - len(last))
        try:
            moved = files.pwritev(descriptor, [*body, tail] if len(tail) else body, done)
            return min(moved, total - done)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    start = done - done % BLOCK  # after a short write the block it ended in is written again
    filled = 0
    for view in _slice(views, start):
        part = view[: len(scratch) - filled]
        scratch[filled : filled + len(part)] = part
        filled += len(part)
    room = -(-filled // BLOCK) * BLOCK
    scratch[filled:room] = bytes(room - filled)
    moved = files.pwritev(descriptor, [scratch[:room]], start)
    return min(start + moved, total) - done


def _nbytes(views: Sequence[memoryview]) -> int:
    return sum(view.nbytes for view in views)


def _slice(views: Sequence[memoryview], skip: int) -> list[memoryview]:
    """What is left of ``views`` behind their first ``skip`` bytes; no empty ones."""
    rest = []
    for view in views:
        if skip < view.nbytes:
            rest.append(view[skip:] if skip else view)
        skip = max(0, skip - view.nbytes)
    return rest


def _aligned(views: Sequence[memoryview], at: int) -> bool:
    """Whether all but the end of the last view can be moved in whole blocks."""
    return at % BLOCK == 0 and all(view.nbytes % BLOCK == 0 for view in views[:-1])


def _split(views: Sequence[memoryview]) -> tuple[list[memoryview], memoryview]:
    """Cut the odd end off the last view."""
    *body, last = views
    whole = last.nbytes - last.nbytes % BLOCK
    if whole:
        body.append(last[:whole])
    return body, last[whole:]
