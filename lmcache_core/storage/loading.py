"""Bringing values up: one flight per value however many ask for it, one trip per backend call.

A flight owns its reservation until the backend call has ended. A trip that nobody waits for any more, or
whose tier's deadline has passed, ends for its callers at once; its extents are quarantined until the call is
really over. What arrives in time is verified (the tier's ``Check`` wrapper saw to it), committed clean,
and leased to everybody who waits, in that order, before anything else can happen on the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from lmcache_core import frame, spi
from lmcache_core.memory.pool import Pool
from lmcache_core.spi import (
    BackendError,
    BufferTooSmall,
    Corrupt,
    DeadlineExceeded,
    Found,
    Key,
    Lease,
    Load,
    LoadStatus,
    Refusal,
)
from lmcache_core.storage import upkeep
from lmcache_core.storage.flights import Done, Flight, Request, Trip
from lmcache_core.storage.locating import locate
from lmcache_core.storage.results import Loaded, Reason
from lmcache_core.storage.tasks import settle

if TYPE_CHECKING:
    from lmcache_core.storage.tier import Tier


class Loader:
    """See the module. ``flights`` holds every value that is on its way.

    Args:
        tiers: all lower tiers; only read.
        prefill: what computing costs, for lookup budgets.
        rose: told the tier, the key and the header of each value that was brought up.
    """

    def __init__(
        self,
        pool: Pool,
        tiers: Sequence[Tier],
        /,
        *,
        now: Callable[[], float],
        rose: Callable[[Tier, Key, frame.Header], None],
    ) -> None:
        self.flights: dict[Key, Flight] = {}
        self._pool = pool
        self._tiers = tiers
        self._now = now
        self._rose = rose

    @property
    def nbytes(self) -> int:
        """Memory of everything on its way."""
        return sum(flight.reservation.extent.nbytes for flight in self.flights.values())

    async def load(
        self,
        keys: Sequence[Key],
        owner: object,
        leases: Sequence[Lease | None],
        /,
        *,
        deadline: float | None,
        budget: float | None,
        tokens: int,
        tenant: str = "",
        share: int | None = None,
        done: Done | None = None,
    ) -> Loaded:
        """Complete ``leases`` (what was resident, leased to ``owner``) from lower tiers.

        Args:
            budget: clock time by which shared tiers must have answered the lookup.
            share: most bytes that may be on their way, None for any number.
        """
        outcomes: list[Lease | Reason | None] = list(leases)
        request = Request(owner, outcomes, done)
        try:
            request.advance()
            if not request.finished.done():
                await self._send(request, keys, deadline, budget, tokens, tenant, share)
                wait = None if deadline is None else deadline - self._now()
                await settle(request.finished, wait)
        except BaseException:
            self._leave(request, keys)
            self._pool.release([each for each in outcomes if not isinstance(each, Reason)])
            raise
        self._leave(request, keys)
        reached = request.reached
        self._pool.release([each for each in outcomes[reached:] if not isinstance(each, Reason)])
        good = [
            each for each in outcomes[:reached] if each is not None and not isinstance(each, Reason)
        ]
        if any(lease is None for lease in leases[:reached]):
            self._pool.touch(keys[:reached])  # what came up piecemeal gets its order: leaf to root
        if reached == len(keys):
            return Loaded(tuple(good), Reason.COMPLETE)
        ended = outcomes[reached]
        return Loaded(tuple(good), ended if isinstance(ended, Reason) else Reason.DEADLINE)

    def doom(self, keys: Sequence[Key], /) -> None:
        """These values are deleted: what is on its way must not become visible."""
        for key in keys:
            if (flight := self.flights.pop(key, None)) is not None:
                flight.doomed = True
                self._tell(flight, Reason.CANCELLED)

    # -- departure -----------------------------------------------------------------------------------------

    async def _send(
        self,
        request: Request,
        keys: Sequence[Key],
        deadline: float | None,
        budget: float | None,
        tokens: int,
        tenant: str,
        share: int | None,
    ) -> None:
        missing = [at for at, outcome in enumerate(request.outcomes) if outcome is None]
        alone = [at for at in missing if not self._join(request, at, keys[at])]
        if not alone:
            return
        asked = [keys[at] for at in alone]
        places, unanswered = await locate(
            self._tiers, asked, deadline=deadline, budget=budget, tokens=tokens, now=self._now
        )
        # Nothing below waits: between here and the trips' start only other threads' commits can interfere.
        wanted: list[tuple[int, Tier, Found]] = []
        leases = self._pool.lease(asked, request.owner)
        for position, (at, place) in enumerate(zip(alone, places, strict=True)):
            if (lease := leases[position]) is not None:
                request.settle(at, lease)
            elif self._join(request, at, keys[at]):
                continue
            elif place is not None:
                wanted.append((at, *place))
            else:
                request.settle(at, Reason.DEADLINE if unanswered else Reason.MISS)
                self._pool.release(leases[position:])
                break
        wanted = self._affordable(request, wanted, tokens, share)
        self._depart(request, keys, wanted, tokens, tenant)

    def _join(self, request: Request, at: int, key: Key) -> bool:
        flight = self.flights.get(key)
        if flight is None:
            return False
        flight.waiting.append((request, at))
        flight.trip.tier.count("coalesced_total")
        return True

    def _affordable(
        self,
        request: Request,
        wanted: list[tuple[int, Tier, Found]],
        tokens: int,
        share: int | None,
    ) -> list[tuple[int, Tier, Found]]:
        """The leading part that pays and fits into the share."""
        totals: dict[Tier, list[int]] = {}
        for _, tier, found in wanted:
            total = totals.setdefault(tier, [0, 0])
            total[0] += found.nbytes
            total[1] += 1
        declined = {
            tier
            for tier, (nbytes, count) in totals.items()
            if not tier.gate.pays(nbytes, count * tokens)
        }
        room = None if share is None else share - self.nbytes
        for position, (at, tier, found) in enumerate(wanted):
            if tier in declined:
                tier.count("gate_skips_total", totals[tier][1], verb="load")
                request.settle(at, Reason.GATE)
                return wanted[:position]
            if room is not None and (room := room - found.nbytes) < 0:
                request.settle(at, Reason.FULL)
                return wanted[:position]
        return wanted

    def _depart(
        self,
        request: Request,
        keys: Sequence[Key],
        wanted: list[tuple[int, Tier, Found]],
        tokens: int,
        tenant: str,
    ) -> None:
        """Reserve in order, as far as that goes, and start one trip per tier."""
        first: dict[Key, tuple[int, Tier, Found]] = {}
        for each in wanted:
            first.setdefault(keys[each[0]], each)
        wants = [(key, found.nbytes) for key, (_, _, found) in first.items()]
        trips: dict[Tier, Trip] = {}
        over = False
        granted = self._pool.reserve(wants, self, tenant=tenant) if wants else ()
        for (key, (at, tier, found)), grant in zip(first.items(), granted, strict=True):
            if not isinstance(grant, Refusal):
                if over:
                    self._pool.abort(grant)
                    continue
                trip = trips.setdefault(tier, Trip(tier, tokens))
                self.flights[key] = flight = Flight(key, grant, trip, found.expires)
                trip.flights.append(flight)
                flight.waiting.append((request, at))
            elif not over:
                lease = (
                    self._pool.lease([key], request.owner)[0] if grant is Refusal.PRESENT else None
                )
                waits = grant in (Refusal.PRESENT, Refusal.PENDING)
                request.settle(at, lease or (Reason.MISS if waits else Reason.FULL))
                over = lease is None
        for at, _, _ in wanted:
            if (
                request.outcomes[at] is None
                and first[keys[at]][0] != at
                and not self._join(request, at, keys[at])
            ):
                request.settle(at, Reason.FULL)
        for trip in trips.values():
            trip.task = trip.tier.tasks.start("load", self._fly(trip))
            trip.task.add_done_callback(partial(self._landed, trip))

    def _leave(self, request: Request, keys: Sequence[Key]) -> None:
        """Wait for nothing any more; trips that nobody else waits for are called back."""
        trips = {}
        for at, outcome in enumerate(request.outcomes):
            flight = self.flights.get(keys[at]) if outcome is None else None
            if flight is not None:
                flight.waiting = [each for each in flight.waiting if each[0] is not request]
                trips[id(flight.trip)] = flight.trip
        for trip in trips.values():
            if trip.task is not None and not any(flight.waiting for flight in trip.flights):
                trip.task.cancel()

    # -- flight and landing ----------------------------------------------------------------------------------

    def _landed(self, trip: Trip, task: asyncio.Task[None]) -> None:
        if not trip.begun:  # cancelled before its first step
            for flight in trip.flights:
                self._pool.abort(flight.reservation)
                self._tell(flight, Reason.CANCELLED)

    async def _fly(self, trip: Trip) -> None:
        trip.begun = True
        tier, flights = trip.tier, trip.flights
        up = dict(enumerate(flights))
        parked: list[Flight] = []
        good, lent = 0, False

        def arrived(index: int, result: spi.Loaded) -> None:
            nonlocal good
            flight = up.pop(index, None)
            if flight is not None and self._land(flight, result):
                good += flight.reservation.extent.nbytes
                patience.arrived()

        def late() -> None:
            for flight in parked:
                self._pool.abort(flight.reservation)

        def give_up(reason: Reason, *, quiet: bool) -> None:
            for flight in up.values():
                if quiet:
                    self._pool.abort(flight.reservation)
                else:
                    self._pool.quarantine(flight.reservation)
                    parked.append(flight)
                self._tell(flight, reason)
            up.clear()

        held = tier.holdings.hold([flight.key for flight in flights]) if tier.holdings else []
        if tier.holdings is not None:
            tier.holdings.touch([slot for _, slot in held])
        begun = self._now()
        until = begun + tier.config.deadline
        patience = tier.gate.patience(len(flights), trip.tokens, self._now)
        batch = [Load(flight.key, (flight.reservation.view,)) for flight in flights]
        try:
            await tier.prepare(self._pool.arena)
            lent = True
            work = tier.backend.load(batch, done=arrived, deadline=until)
            results = await tier.call(
                "load", work, patience.until, nbytes=lambda: _nbytes(up), late=late
            )
            for index, result in enumerate(results):
                arrived(index, result)
            if good:
                tier.gate.load.note(good, self._now() - begun)
        except DeadlineExceeded:
            # Computing what is left may take less time than waiting for it.
            slow = patience.limit <= self._now() < until
            took = self._now() - begun
            if not slow:
                tier.gate.load.note(_nbytes(up) + good, took)
            else:  # when nothing came, it is only known that all would take longer
                tier.gate.load.note(good or _nbytes(up), took if good else 2 * took)
            if slow:
                tier.count("gate_skips_total", len(up), verb="load")
            give_up(Reason.GATE if slow else Reason.DEADLINE, quiet=False)
        except BackendError:
            give_up(Reason.FAILED, quiet=True)
        except BaseException:
            give_up(Reason.CANCELLED, quiet=not lent)
            raise
        finally:
            assert not up, "a flight was forgotten"
            if tier.holdings is not None:
                tier.holdings.release(held)

    def _land(self, flight: Flight, result: spi.Loaded) -> bool:
        """Make a value visible and hand it to all who wait, or say why not."""
        tier, key = flight.trip.tier, flight.key
        if result.status is LoadStatus.FILLED and not flight.doomed:
            try:
                header = frame.open_header(flight.reservation.view, key)
            except Corrupt as error:
                result = spi.Loaded.failed(error)
            else:
                return self._arrive(flight, header)
        self._pool.abort(flight.reservation)
        if flight.doomed:
            return False
        if result.status is LoadStatus.MISSED:
            upkeep.lose(tier, key)
            self._tell(flight, Reason.MISS)
        elif isinstance(result.error, Corrupt):
            upkeep.damaged(tier, key, result.error)
            self._tell(flight, Reason.DAMAGED)
        else:
            if isinstance(result.error, BufferTooSmall):
                tier.mislead(key)
            self._tell(flight, Reason.FAILED)
        return False

    def _arrive(self, flight: Flight, header: frame.Header) -> bool:
        tier, key, pool = flight.trip.tier, flight.key, self._pool
        self.flights.pop(key, None)
        if not pool.commit(
            flight.reservation, header.identity, tags=header.tags, expires=flight.expires
        ):
            self._tell(flight, Reason.CANCELLED)
            return False
        tier.count("promoted_chunks_total")
        for request, at in flight.waiting:
            # Between commit and lease another thread may have needed the room; then it is full indeed.
            request.settle(at, pool.lease([key], request.owner)[0] or Reason.FULL)
        if tier.config.promote:
            self._rose(tier, key, header)
        else:
            pool.drop([key])  # its memory returns with the last lease
        return True

    def _tell(self, flight: Flight, reason: Reason) -> None:
        if self.flights.get(flight.key) is flight:
            del self.flights[flight.key]
        for request, at in flight.waiting:
            request.settle(at, reason)
        flight.waiting = []


def _nbytes(flights: dict[int, Flight]) -> int:
    return sum(flight.reservation.extent.nbytes for flight in flights.values())
