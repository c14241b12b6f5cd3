"""Tiers in configuration order behind one set of verbs; the resident one is where every value is used.

A value is one *frame* everywhere: header room and payload, contiguous in one extent of the resident pool.
The writer reserves, fills the payload, seals the header and commits; from then on the value is visible and
the manager carries the very same bytes to lower tiers. A reader leases; what lies in lower tiers is read into
a fresh extent first, verified, and becomes visible like any other value.

The verbs that touch only resident memory are plain calls: thread-safe, no wait, no other thread involved.
Everything else is a coroutine of the one event loop the manager was opened on. Misses, refusals and
deadlines are values; a coroutine raises ``Closed`` after ``aclose`` and nothing else.

Deadlines are times of ``context.clock``; None stands for the deadlines of the tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lmcache_core.config import Config
from lmcache_core.spi import Context, Key, Lease, Refusal, Reservation, ResidentPool
from lmcache_core.storage.results import (
    Flushed,
    Listing,
    Loaded,
    Lookup,
    Outcome,
    Shutdown,
)
from lmcache_core.storage.tier import Tier


class StorageManager:
    """See the module.

    Args:
        pool: resident memory. Belongs to the manager from now on, ``aclose`` closes it.
        tiers: lower tiers in lookup order, not yet opened.
        config: shares of memory, cost gate, chunk size, tenants.
        context: clock, randomness, log and ``emit``; its tier name is the name of the resident tier.
    """

    def __init__(
        self,
        pool: ResidentPool,
        tiers: Sequence[Tier] = (),
        *,
        config: Config | None = None,
        context: Context,
    ) -> None: ...

    # -- resident memory: any thread, no wait --------------------------------------------------------------

    def lookup_resident(self, keys: Sequence[Key], /) -> Sequence[int | None]:
        """Frame length of each resident value; no lease, no touch, not counted as a lookup."""
        ...

    def lease(self, keys: Sequence[Key], owner: object, /) -> Sequence[Lease | None]:
        """Lease those values that are resident and touch them, last key first."""
        ...

    def release(self, leases: Sequence[Lease], /) -> None:
        """End leases; twice is harmless."""
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
        """Promise memory for frames of the given lengths (header room included), in order.

        Args:
            owner: whose reservations these are; ``abort`` or ``commit`` ends each, time never does.
            cost: of recomputing one of them, for policies that weigh it.
            tags: labels for ``invalidate``; the writer seals the same ones into the frame's header.
        """
        ...

    def commit(self, reservation: Reservation, identity: bytes, /) -> bool:
        """Make a filled, sealed frame visible at once; tiers that want it get it in the background.

        Args:
            identity: ``Header.identity`` of the sealed frame.

        Returns False when the reservation had ended meanwhile (aborted, invalidated): nothing is visible.
        """
        ...

    def abort(self, reservation: Reservation, /) -> None:
        """Give the memory back; idempotent."""
        ...

    # -- all tiers: coroutines of the manager's loop ---------------------------------------------------------

    async def open(self) -> None:
        """Open the tiers, in order, and start serving; a tier that does not answer is an ailing tier.

        Raises:
            ConfigError: a tier's configuration cannot work here. What was opened is closed again.
        """

    async def lookup(
        self, keys: Sequence[Key], /, *, deadline: float | None = None, tokens: int = 0
    ) -> Lookup:
        """Tell where each value is, without moving or leasing it.

        Local tiers answer from the manager's own index. Others are asked in one call per tier, within
        the least of ``deadline``, the tier's own, and the configured share of the predicted prefill.

        Args:
            tokens: of one chunk, for counters and the cost gate; 0 for the configured chunk size.
        """
        ...

    async def load(
        self,
        keys: Sequence[Key],
        owner: object,
        /,
        *,
        deadline: float | None = None,
        tokens: int = 0,
        tenant: str = "",
    ) -> Loaded:
        """Bring values into resident memory and lease them: *n* good leading ones, then the reason.

        Equal loads in flight are one load. What misses the deadline goes on for others who wait for it and
        is otherwise cancelled; cancelling the coroutine releases what it had leased.
        """
        ...

    async def prefetch(
        self,
        keys: Sequence[Key],
        owner: object,
        /,
        *,
        deadline: float | None = None,
        tokens: int = 0,
        tenant: str = "",
    ) -> Loaded:
        """``load`` within the share of memory set aside for prefetching (``FULL`` beyond it)."""
        ...

    async def store(
        self,
        items: Sequence[tuple[Key, Sequence[memoryview]]],
        /,
        *,
        deadline: float | None = None,
        tenant: str = "",
        cost: float = 1.0,
        tags: Sequence[str] = (),
    ) -> Sequence[Outcome]:
        """For tools: frame opaque payloads, commit them, and wait for the write-through tiers."""
        ...

    async def load_into(
        self, keys: Sequence[Key], into: Sequence[memoryview], /, *, deadline: float | None = None
    ) -> int:
        """For tools: load and copy payloads into buffers of exactly their length; counts the leading good ones."""
        ...

    async def delete(self, keys: Sequence[Key], /, *, deadline: float | None = None) -> int:
        """Forget values everywhere and count those that were anywhere; leases already given stay good."""
        ...

    async def copy(
        self, keys: Sequence[Key], source: str, target: str, /, *, deadline: float | None = None
    ) -> int:
        """Copy values between two tiers by name; counts those that are in the target afterwards."""
        ...

    async def move(
        self, keys: Sequence[Key], source: str, target: str, /, *, deadline: float | None = None
    ) -> int:
        """``copy``, then forget in the source what has arrived."""
        ...

    async def clear(
        self,
        wanted: Callable[[Key], bool] | None = None,
        /,
        *,
        tier: str | None = None,
        deadline: float | None = None,
    ) -> int:
        """Forget all values, or those ``wanted``, of one tier or of all; counts values per tier.

        They are invisible before the first deletion begins; serving goes on meanwhile.
        """
        ...

    async def invalidate(self, tag: str, /, *, deadline: float | None = None) -> int:
        """Delete every value stored under a tag, by this process or an earlier one, and count them."""
        ...

    async def list(
        self, tier: str, /, *, space: bytes | None = None, after: str | None = None, limit: int = 1000
    ) -> Listing:
        """Name values of one tier, optionally of one key space."""
        ...

    async def flush(self, *, deadline: float | None = None) -> Flushed:
        """Write everything that is still only in memory to the tiers that want it."""
        ...

    def freeze(self) -> None:
        """Accept no new values and write none until ``unfreeze``; reads go on."""

    def unfreeze(self) -> None: ...

    async def add_tier(self, tier: Tier, /, *, position: int | None = None) -> None:
        """Open a tier and serve from it; ``position`` counts from the first lower tier, default last."""

    async def remove_tier(self, name: str, /, *, deadline: float | None = None) -> Shutdown:
        """Stop serving from a tier, write what it still wants, and close it."""
        ...

    async def set_limit(self, tier: str, nbytes: int, /) -> None:
        """Change a tier's byte limit; a smaller one evicts at once."""

    def report_prefill(self, tokens: int, seconds: float, /) -> None:
        """The engine tells how long it took to compute ``tokens``; feeds the cost gate."""

    def tags(self, names: Iterable[str] = (), /) -> dict[str, int]:
        """How many known values carry each tag."""
        ...

    async def aclose(self, *, deadline: float | None = None) -> Shutdown:
        """Refuse new work, flush, close the tiers, and be back in time whatever they do. Idempotent."""
        ...

    def check(self) -> None:
        """Assert the invariants of memory, limits, tasks and counters."""
