"""The cache behind a socket: ``engine.CacheClient`` for engines whose daemon may come and go.

Every call is a blocking exchange of the calling thread on a connection of its own; it comes back by its deadline
and raises nothing: a daemon that is absent, slow or restarting answers with misses and refusals, at once. One
helper thread, which no call waits for, connects again and tells the daemon what has ended.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from lmcache_core.spi import Key, Lease, Refusal, Reservation
from lmcache_core.storage.results import Flushed, Loaded, Lookup, Place, Reason, Shutdown
from lmcache_core.wire import records, replies
from lmcache_core.wire.codec import to_extents, to_runs
from lmcache_core.wire.connection import NO_ANSWER, Connections
from lmcache_core.wire.grants import IDENTITY, Home, RemoteLease, RemoteLeases, RemoteReservation
from lmcache_core.wire.greeting import nonsense
from lmcache_core.wire.link import Link
from lmcache_core.wire.records import MOST_KEYS
from lmcache_core.wire.streamed import take

T = TypeVar("T", bound=records.Message)
_REASONS = {reason.value: reason for reason in Reason}
_REFUSALS = {refusal.value: refusal for refusal in Refusal}
Handle = tuple[bytes, int, tuple[Key, ...], bytes, bytes]
"""Dispatched leases as they travel to the ranks: boot id, grant, keys, packed extents, identities."""
_SLACK = 0.9
"""Share of a call's time that the daemon is given."""


class DaemonClient(Connections):
    """See the module, and ``Connections`` for its arguments.

    Values are read and written in the daemon's own memory where its socket can pass that; otherwise they
    travel over the connection, and leases are copies.
    """

    # -- values --------------------------------------------------------------------------------------------

    def lookup(
        self, keys: Sequence[Key], /, *, deadline: float | None = None, tokens: int = 0
    ) -> Lookup:
        nothing = Lookup((None,) * len(keys), ("daemon",))
        if not keys or len(keys) > MOST_KEYS:
            return nothing
        runs, until = to_runs(keys), self._until(deadline)
        with suppress(*NO_ANSWER):
            found = self.ask(
                replies.Found,
                lambda id: records.Find(id, runs, self._left(until), tokens),
                until,
            )
            whole = len(found.where) == len(found.nbytes) == len(keys)
            if whole and max(found.where) < len(found.tiers):
                pairs = zip(found.where, found.nbytes, strict=True)
                places = [Place(found.tiers[at], n) if at >= 0 else None for at, n in pairs]
                return Lookup(tuple(places), tuple(found.unanswered))
        return nothing

    def load(
        self,
        keys: Sequence[Key],
        owner: object,
        /,
        *,
        deadline: float | None = None,
        tokens: int = 0,
        tenant: str = "",
        seconds: float | None = None,
    ) -> Loaded:
        """See ``CacheClient``; ``seconds`` is what the daemon may take, if less than the deadline leaves."""
        if not keys:
            return Loaded((), Reason.COMPLETE)
        if len(keys) > MOST_KEYS:
            return Loaded((), Reason.FULL)
        runs, until = to_runs(keys), self._until(deadline)
        try:
            with self.link(until) as (link, home):
                reply = self.exchange(
                    link, home, replies.Granted,
                    lambda id: records.Load(
                        id, runs, self._left(until) if seconds is None else seconds, tokens, tenant,
                        not link.local,
                    ),
                    until,
                )  # fmt: skip
                with home.unless_used(reply):
                    return self._granted(link, home, keys, reply, until)
        except NO_ANSWER:
            return Loaded((), self.trouble)

    def reserve(
        self,
        wants: Sequence[tuple[Key, int]],
        owner: object,
        /,
        *,
        tenant: str = "",
        cost: float = 1.0,
        tags: Sequence[str] = (),
        engine: str = "",
        turn: int = 0,
        firsts: Sequence[int] = (),
        deadline: float | None = None,
    ) -> Sequence[Reservation | Refusal]:
        """See ``CacheClient``; ranks of one ``engine`` fill a chunk together (``commit_parts``), in one ``turn``.

        Together they write in place or not at all: a sealed daemon refuses.
        """
        home = self.home
        if engine and home is not None and not home.writable:
            return [Refusal.UNWANTED] * len(wants)
        if not wants or len(wants) > MOST_KEYS:
            return [Refusal.UNWANTED] * len(wants)
        keys, until = [key for key, _ in wants], self._until(deadline)
        sizes = b"".join(nbytes.to_bytes(8, "little") for _, nbytes in wants)
        with suppress(*NO_ANSWER), self.link(until) as (link, home):
            reply = self.exchange(
                link, home, replies.Reserved,
                lambda id: records.Reserve(
                    id, to_runs(keys), sizes, tenant, cost, list(tags), engine, turn,
                    array("q", firsts).tobytes(),
                ),
                until,
            )  # fmt: skip
            with home.unless_used(reply):
                return self._reserved(link, home, wants, reply, until)
        return [Refusal.UNWANTED] * len(wants)

    def commit_batch(
        self,
        reservations: Sequence[Reservation],
        identities: Sequence[bytes],
        /,
        *,
        ttl: float | None = None,
        deadline: float | None = None,
    ) -> Sequence[bool]:
        return self._commit(reservations, identities, ttl, deadline, parts=False)

    def commit_parts(
        self,
        reservations: Sequence[Reservation],
        digests: Sequence[bytes],
        /,
        *,
        ttl: float | None = None,
        deadline: float | None = None,
    ) -> Sequence[bool]:
        """This rank has filled its segments; ``digests`` holds theirs, 16 bytes each, per reservation.

        A value becomes visible when the last segment is filled. False: another rank has aborted it.
        """
        return self._commit(reservations, digests, ttl, deadline, parts=True)

    def abort(self, reservation: Reservation, /) -> None:
        assert isinstance(reservation, RemoteReservation)
        reservation.end(abort=True)
        self.nudge()

    def release(self, leases: Sequence[Lease | None], /) -> None:
        if isinstance(leases, RemoteLeases):
            leases.end()
        else:
            parts: dict[int, tuple[RemoteLeases, list[int]]] = {}
            for lease in leases:
                if isinstance(lease, RemoteLease):
                    parts.setdefault(id(lease.batch), (lease.batch, []))[1].append(lease.position)
            for batch, positions in parts.values():
                batch.end(positions)
        self.nudge()

    def dispatch(self, engine: str, leases: RemoteLeases, /, ranks: int) -> Handle | None:
        """Hand leases to all ``ranks`` of an engine, which read and release them by themselves (``adopt``).

        They are not this process's any more. Returns what the ranks need; None when the daemon is gone.
        """
        with suppress(*NO_ANSWER):
            until = self._until(None)
            with self.link(until) as (link, home):
                if home is leases.home and leases.grant in home.held:
                    link.post(records.Dispatch(engine, [leases.grant], ranks), until)
                    with home.lock:
                        home.held.discard(leases.grant)
                        home.dispatched[leases.grant] = engine, ranks
                    words = leases.words.tobytes()
                    return (home.boot, leases.grant, tuple(leases.keys), words, leases.identities)
        return None

    def adopt(self, handle: Handle, /) -> RemoteLeases | None:
        """Leases that were dispatched to this rank.

        None when they are over, as this rank has joined anew since, or lie in memory that is not mapped here.
        """
        boot, grant, keys, words, identities = handle
        # Memory of a daemon that is gone stays mapped, and is nobody else's any more.
        lives = (self.home, self._previous)
        home = next((each for each in lives if each is not None and each.boot == boot), None)
        if home is None:
            return None
        if home is self.home and not home.knows(words):
            with suppress(*NO_ANSWER), self.link(self._until(None)) as (link, _):
                self.fetch(link, home, self._until(None))
        if not home.knows(words):
            with home.lock:
                home.ended.append(grant)
            return None
        return RemoteLeases(home, grant, keys, words, identities) if home.adopt(grant) else None

    def delete(self, keys: Sequence[Key], /, *, deadline: float | None = None) -> int:
        until = self._until(deadline)
        with suppress(*NO_ANSWER):
            return self.ask(
                replies.Count,
                lambda id: records.Delete(id, to_runs(keys), self._left(until)),
                until,
            ).count
        return 0

    def prefetch(
        self, keys: Sequence[Key], seconds: float, /, *, tokens: int = 0
    ) -> Callable[[], bool]:
        """Have values brought up in the background; what is returned tells, without a call, whether that has ended."""
        ended = [not keys or len(keys) > MOST_KEYS]
        if not ended[0]:
            runs = to_runs(keys)
            try:
                job = self.ask(
                    replies.Count, lambda id: records.Prefetch(id, runs, seconds, tokens)
                ).count
                self.on_ready(job, lambda notice: ended.__setitem__(0, True))
            except NO_ANSWER:
                ended[0] = True

        def over() -> bool:
            if not ended[0]:
                self.poll()
            return ended[0] or self.home is None

        return over

    def report_prefill(self, tokens: int, seconds: float, /) -> None:
        self.post(records.Prefill(tokens, seconds))

    # -- what operators and ``Cache`` ask for ---------------------------------------------------------------

    def invalidate(self, tag: str, /, *, deadline: float | None = None) -> int:
        """Delete everything stored under a tag; counts the copies there were.

        Raises:
            BackendError: the daemon is gone or did not answer in time.
        """
        until = self._until(deadline)
        return self.ask(
            replies.Count, lambda id: records.Clear(id, self._left(until), tag=tag), until
        ).count

    def flush(self, *, deadline: float | None = None) -> Flushed:
        """Have everything written that is only in memory; tells what is left.

        Raises:
            BackendError: as ``invalidate``.
        """
        until = self._until(deadline)
        left = self.ask(replies.Count, lambda id: records.Flush(id, self._left(until)), until)
        return Flushed(left.count, left.nbytes)

    def usage(self) -> Sequence[tuple[str, int, int]]:
        """(tier, bytes, chunks) in lookup order; nothing when the daemon is gone."""
        with suppress(*NO_ANSWER):
            document = json.loads(self.ask(replies.Document, records.Describe).json)
            memory = document["memory"]
            used = memory["capacity"] - memory["free"]
            lower = [(each["name"], each["bytes"], each["chunks"]) for each in document["tiers"]]
            return [(memory["tier"], used, memory["values"]), *lower]
        return []

    def ask(
        self, kind: type[T], make: Callable[[int], records.Message], until: float | None = None
    ) -> T:
        """One exchange of any kind of request.

        Args:
            until: monotonic time; None for the client's own timeout.

        Raises:
            Unavailable, DeadlineExceeded: no answer.
            ConfigError, BackendError: the daemon refused.
        """
        until = self._until(None) if until is None else until
        with self.link(until) as (link, home):
            return self.exchange(link, home, kind, make, until)

    def close(self, *, deadline: float | None = None) -> Shutdown:
        """Part from the daemon; what was leased stays readable. Idempotent."""
        self.shut(deadline)
        return Shutdown()

    # -- inside --------------------------------------------------------------------------------------------

    def _granted(
        self, link: Link, home: Home, keys: Sequence[Key], reply: replies.Granted, until: float
    ) -> Loaded:
        count = len(reply.identities) // IDENTITY
        if len(reply.extents) != 32 * count or count > len(keys):
            raise nonsense(link, "leases that were not asked for")
        values, reason = None, _REASONS.get(reply.reason, Reason.FAILED)
        if not link.local:
            values = take(link, reply, keys, self.spare, until, verify=not self.address.tls)
            if len(values) < count:
                count, reason = len(values), Reason.DAMAGED
        elif not home.knows(reply.extents):
            self.fetch(link, home, until)
            if not home.knows(reply.extents):
                raise nonsense(link, "a segment that it does not hand out")
        held = reply.grant, keys, reply.extents[: 32 * count], reply.identities
        return Loaded(RemoteLeases(home, *held, values, self.spare), reason)

    def _reserved(
        self,
        link: Link,
        home: Home,
        wants: Sequence[tuple[Key, int]],
        reply: replies.Reserved,
        until: float,
    ) -> Sequence[Reservation | Refusal]:
        local = not (link.local and home.writable)
        if not local and not home.knows(reply.extents):
            self.fetch(link, home, until)
        granted = len(reply.grants) - reply.grants.count(0)
        if len(reply.grants) != len(wants) or len(reply.extents) != 32 * granted:
            raise nonsense(link, "another number of reservations")
        extents = iter(to_extents(reply.extents))
        answers: list[Reservation | Refusal] = []
        refusals = iter(reply.refusals)
        for (key, nbytes), grant in zip(wants, reply.grants, strict=True):
            if not grant:
                answers.append(_REFUSALS.get(next(refusals, ""), Refusal.UNWANTED))
                continue
            extent = next(extents)
            if extent.nbytes != nbytes:
                raise nonsense(link, "a reservation of another size")
            answers.append(RemoteReservation(home, grant, key, extent, local=local))
        return answers

    def _commit(
        self,
        reservations: Sequence[Reservation],
        identities: Sequence[bytes],
        ttl: float | None,
        deadline: float | None,
        *,
        parts: bool,
    ) -> list[bool]:
        good = [False] * len(reservations)
        open_: list[tuple[int, RemoteReservation]] = []
        for at, each in enumerate(reservations):
            assert isinstance(each, RemoteReservation)
            if each.home is self.home and each.grant in each.home.held:
                open_.append((at, each))
            else:
                each.end(abort=True)
        if not open_:
            return good
        until = self._until(deadline)
        grants = [each.grant for _, each in open_]
        packed = b"".join(identities[at] for at, _ in open_)
        values = [each.local for _, each in open_ if each.local is not None]
        nbytes = sum(value.nbytes for value in values)

        def make(id: int) -> records.Message:
            if parts:
                return records.Part(id, grants, packed, ttl)
            return records.Commit(id, grants, packed, ttl, nbytes)

        answered = False
        with suppress(*NO_ANSWER), self.link(until) as (link, home):
            if home is open_[0][1].home:
                reply = self.exchange(
                    link, home, replies.Committed, make, until, after=() if parts else values
                )
                answered = True
                for (at, _), done in zip(open_, reply.good, strict=False):
                    good[at] = done
        # Without an answer nobody knows; what has become visible no abort reaches.
        for _, each in open_:
            each.end(abort=not answered)
        return good

    def _left(self, until: float) -> float:
        """Seconds the daemon may take."""
        return max(0.0, until - self.now()) * _SLACK
