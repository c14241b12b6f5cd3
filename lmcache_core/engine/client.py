"""The two sides of an engine: what it asks of the cache, and what the cache asks of its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lmcache_core.spi import GPUConnector, Key, Lease, Refusal, Reservation
from lmcache_core.storage.results import Loaded, Lookup


class CacheClient(Protocol):
    """The cache as an engine sees it, in its own process or behind a socket.

    Every call comes back by its deadline and raises nothing: a cache that is gone answers with misses
    and refusals.
    """

    def lookup(
        self, keys: Sequence[Key], /, *, deadline: float | None = None, tokens: int = 0
    ) -> Lookup:
        """Tell where each value is, without moving it."""
        ...

    def load(
        self,
        keys: Sequence[Key],
        owner: object,
        /,
        *,
        deadline: float | None = None,
        tokens: int = 0,
        tenant: str = "",
    ) -> Loaded:
        """Make values resident and lease them: the good leading ones, then the reason."""
        ...

    def reserve(
        self,
        wants: Sequence[tuple[Key, int]],
        owner: object,
        /,
        *,
        tenant: str = "",
        cost: float = 1.0,
        tags: Sequence[str] = (),
    ) -> Sequence[Reservation | Refusal]:
        """Promise memory for frames of these lengths; never waits."""
        ...

    def commit_batch(
        self,
        reservations: Sequence[Reservation],
        identities: Sequence[bytes],
        /,
        *,
        ttl: float | None = None,
    ) -> Sequence[bool]:
        """Make sealed frames of one prefix visible, root first; False for those that had ended meanwhile."""
        ...

    def abort(self, reservation: Reservation, /) -> None: ...

    def release(self, leases: Sequence[Lease], /) -> None: ...

    def delete(self, keys: Sequence[Key], /, *, deadline: float | None = None) -> int: ...

    def report_prefill(self, tokens: int, seconds: float, /) -> None:
        """Tell what computing costs, for the cost gate."""
        ...


class Surface(Protocol):
    """Engine memory of one request, addressed by token position."""

    def pack(
        self, group: int, first: int, count: int, into: memoryview, seed: int, /
    ) -> Sequence[bytes]:
        """Copy tokens [first, first + count) of a group out and return one digest per segment.

        Raises:
            ValueError: the positions are not there (a sliding window has passed them): nothing is stored.
        """
        ...

    def unpack(
        self,
        group: int,
        first: int,
        count: int,
        source: memoryview,
        seed: int,
        digests: Sequence[bytes],
        /,
    ) -> bool:
        """Copy a payload in; with ``digests`` verify it in the same pass. False: what arrived is not good."""
        ...


@dataclass(frozen=True, slots=True)
class Paged:
    """Surface of a paged cache: a bound connector and the block tables of one request.

    Attributes:
        blocks: for each group, ids of the blocks holding its tokens from position ``base`` on.
        base: token position of the first slot of the first block.
    """

    connector: GPUConnector
    blocks: Sequence[Sequence[int]]
    base: int = 0

    def pack(
        self, group: int, first: int, count: int, into: memoryview, seed: int, /
    ) -> Sequence[bytes]:
        fence = self.connector.pack(
            group, self.blocks[group], first - self.base, count, into, seed=seed
        )
        copied = fence.wait()
        if copied is None or copied.digests is None:
            raise ValueError("the connector finished without digests")
        whole = copied.digests
        return [whole[i : i + 16] for i in range(0, len(whole), 16)]

    def unpack(
        self,
        group: int,
        first: int,
        count: int,
        source: memoryview,
        seed: int,
        digests: Sequence[bytes],
        /,
    ) -> bool:
        fence = self.connector.unpack(
            group,
            self.blocks[group],
            first - self.base,
            count,
            source,
            seed=seed if digests else None,
            digests=b"".join(digests) if digests else None,
        )
        copied = fence.wait()
        return copied is not None and copied.bad_segment < 0
