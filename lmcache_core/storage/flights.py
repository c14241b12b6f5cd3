"""Who waits for what while values are on their way up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from lmcache_core.spi import Key, Lease, Reservation
from lmcache_core.storage.results import Reason

if TYPE_CHECKING:
    from lmcache_core.storage.tier import Tier

Done = Callable[[int, Lease], None]


class Request:
    """One call of ``load``: collects what arrives for it, in order."""

    def __init__(
        self, owner: object, outcomes: list[Lease | Reason | None], done: Done | None
    ) -> None:
        self.owner = owner
        self.outcomes = outcomes
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.reached = 0
        self._done = done

    def settle(self, at: int, outcome: Lease | Reason) -> None:
        self.outcomes[at] = outcome
        self.advance()

    def advance(self) -> None:
        """Report the leading run as far as it goes; finished when it cannot grow any more."""
        while self.reached < len(self.outcomes):
            outcome = self.outcomes[self.reached]
            if outcome is None:
                return
            if isinstance(outcome, Reason):
                break
            if self._done is not None:
                self._done(self.reached, outcome)
            self.reached += 1
        if not self.finished.done():
            self.finished.set_result(None)


class Flight:
    """One value on its way into resident memory."""

    __slots__ = ("doomed", "expires", "key", "reservation", "trip", "waiting")

    def __init__(
        self, key: Key, reservation: Reservation, trip: Trip, expires: float | None
    ) -> None:
        self.key = key
        self.reservation = reservation
        self.trip = trip
        self.expires = expires
        self.waiting: list[tuple[Request, int]] = []
        self.doomed = False
        """Deleted meanwhile: must not become visible."""


class Trip:
    """One backend call for several flights."""

    __slots__ = ("begun", "flights", "task", "tier", "tokens")

    def __init__(self, tier: Tier, tokens: int) -> None:
        self.tier = tier
        self.tokens = tokens
        """Of one chunk."""
        self.begun = False
        self.flights: list[Flight] = []
        self.task: asyncio.Task[None] | None = None
