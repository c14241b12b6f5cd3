"""Requests that name many values are answered in slices: others get their turn between two of them.

Still one reply, by one deadline. A request whose client has gone in the middle is given up, and what it was granted so far
comes back.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, TypeVar, overload

from lmcache_core.spi import Closed, Key, Lease
from lmcache_core.wire.codec import to_keys
from lmcache_core.wire.records import MOST_KEYS, Run

if TYPE_CHECKING:
    from lmcache_server.connection import Connection

T = TypeVar("T")
MANY = 512
"""Values that are looked up, leased or released in one turn."""
MANY_WRITTEN = 128
"""Values that are reserved or committed in one turn: each is more work."""


def many(runs: Sequence[Run], most: int = MANY, /) -> bool:
    """Whether there are more keys than that.

    Raises:
        ValueError: more than there may be, or digests that are not whole.
    """
    if len(runs) == 1 and len(runs[0].digests) <= 32 * most:
        return False
    return counted(runs) > most


def counted(runs: Sequence[Run], /) -> int:
    """How many keys there are.

    Raises:
        ValueError: more than there may be, or digests that are not whole.
    """
    nbytes = sum(len(run.digests) for run in runs)
    if nbytes > 32 * MOST_KEYS or any(len(run.digests) % 32 for run in runs):
        raise ValueError(f"not whole digests, or more than {MOST_KEYS}")
    return nbytes // 32


def keys_in_slices(runs: Sequence[Run], most: int, /) -> Iterator[list[Key]]:
    """The keys of a request in their order, at most so many at once."""
    keys: list[Key] = []
    for run in runs:
        at = 0
        while at < len(run.digests):
            end = at + 32 * (most - len(keys))
            keys += to_keys([Run(run.space, run.group, run.digests[at:end])])
            at = end
            if len(keys) == most:
                yield keys
                keys = []
    if keys:
        yield keys


async def others(link: Connection, /) -> None:
    """Let others have their turn.

    Raises:
        Closed: the client is not there any more.
    """
    await asyncio.sleep(0)
    if link.closed:
        raise Closed("the client has gone")


def in_turns(work: Iterator[None]) -> None:
    """Do the first part of some work now, and one more after each turn of the others."""
    for _ in work:
        asyncio.get_running_loop().call_soon(in_turns, work)
        break


def in_parts(call: Callable[[T], None], items: Sequence[T], most: int, /) -> Iterator[None]:
    """Work for ``in_turns``: a call for each item, at most so many in a turn."""
    for at, item in enumerate(items):
        if at and not at % most:
            yield
        call(item)


class Joined(Sequence[Lease | None]):
    """Leases that were granted slice by slice, as one sequence; ``parts`` end one by one."""

    def __init__(self, parts: Sequence[Sequence[Lease | None]]) -> None:
        self.parts = [*parts]
        self._ends = [*accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._ends[-1]

    def __iter__(self) -> Iterator[Lease | None]:
        return chain.from_iterable(self.parts)

    @overload
    def __getitem__(self, at: int, /) -> Lease | None: ...
    @overload
    def __getitem__(self, at: slice, /) -> Sequence[Lease | None]: ...
    def __getitem__(self, at: int | slice, /) -> Lease | Sequence[Lease | None] | None:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        if not 0 <= at < len(self):
            raise IndexError(at)
        part = bisect_right(self._ends, at)
        return self.parts[part][at - (self._ends[part - 1] if part else 0)]

    def again(self, share: Callable[[Sequence[Lease | None]], Sequence[Lease | None]]) -> Joined:
        """The same leases for another owner."""
        return Joined([share(part) for part in self.parts])

    def end(self, release: Callable[[Sequence[Lease | None]], None]) -> None:
        """Release a part now, and one after each turn of the others."""
        if self.parts:
            release(self.parts.pop())
            asyncio.get_running_loop().call_soon(self.end, release)
