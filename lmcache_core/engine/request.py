"""One request's way through the cache.

States only ever move forward: *new*, *offered* (chunks are leased), *ended*. Every call is legal in every
state and may be repeated; what makes no sense any more does nothing. The leases belong to the request until
``load`` has copied them or ``end`` lets them go.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from lmcache_core import frame
from lmcache_core.engine.client import Surface
from lmcache_core.engine.reuse import Span, Wanted, legal_end, wanted
from lmcache_core.identity import Chain, Extra, KeySpace, Tokens, Unkeyable
from lmcache_core.spi import Key, Lease, Refusal, Reservation, Reuse
from lmcache_core.spi.errors import Corrupt
from lmcache_core.storage.results import Reason

if TYPE_CHECKING:
    from lmcache_core.engine.engine import CacheEngine

P = ParamSpec("P")
T = TypeVar("T")


def _timed(
    verb: str,
) -> Callable[[Callable[Concatenate[Request, P], T]], Callable[Concatenate[Request, P], T]]:
    """Count the time a verb takes, once per call from outside."""

    def wrap(method: Callable[Concatenate[Request, P], T]) -> Callable[Concatenate[Request, P], T]:
        @functools.wraps(method)
        def timed(self: Request, /, *args: P.args, **how: P.kwargs) -> T:
            began = self._engine.timer()
            try:
                return method(self, *args, **how)
            finally:
                spent = self._engine.timer() - began
                self.seconds += spent
                self._engine.metrics.observe("lmcache_request_seconds", spent, verb=verb)

        return timed

    return wrap


class State(Enum):
    """Where a request is."""

    NEW = "new"
    OFFERED = "offered"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Saved:
    """What became of a store, in tokens: ``stored + present + left = tokens of the full chunks``.

    ``reason`` says why something was not kept: ``"full"``, ``"pending"``, ``"unwanted"`` ...
    """

    stored: int
    present: int
    left: int = 0
    reason: str = ""


@dataclass(slots=True)
class _Offer:
    """Leased values in the order they are copied.

    ``tokens`` is the position the last of them ends at, ``reach`` how far they are offered.
    """

    wants: list[Wanted]
    leases: list[Lease]
    tokens: int
    reach: int = 0


class Request:
    """Made by ``CacheEngine.request``; one thread at a time.

    Attributes:
        id: the engine's name for it.
        state: see ``State``.
        reason: why the last lookup or load ended where it did.
        seconds: spent in the cache's own code so far, copies included.
    """

    def __init__(
        self,
        engine: CacheEngine,
        id: str,
        tokens: Tokens,
        /,
        *,
        space: KeySpace,
        extras: Iterable[Extra] = (),
        tags: Sequence[str] = (),
        skip_load: bool = False,
        skip_save: bool = False,
        cost: float = 1.0,
        ttl: float | None = None,
    ) -> None:
        self.id = id
        self.state = State.NEW
        self.reason = Reason.MISS
        self.seconds = 0.0
        self._engine = engine
        self._space = space
        self._tags = tuple(tags)
        self._skip_load = skip_load
        self._skip_save = skip_save
        self._cost = cost
        self._ttl = ttl
        size, given = engine.forms.chunk_tokens, tuple(extras)
        self._chains = [Chain(each.root, size, extras=given) for each in space.readable]
        self._offer: _Offer | None = None
        self._open: list[Reservation] = []
        self.extend(tokens)

    @property
    def tokens(self) -> int:
        """Tokens known so far."""
        return self._chains[-1].tokens

    @property
    def room(self) -> int:
        """Token position up to which ``load`` may write: the end of the last chunk on offer."""
        return self._offer.tokens if self._offer is not None else 0

    @_timed("key")
    def extend(self, tokens: Tokens, /) -> None:
        """Append confirmed (generated) tokens; a lookup that was answered stays as it was.

        Raises:
            Unkeyable: an id that is none (counted). Nothing was appended, and nothing after these tokens may be.
        """
        try:
            for chain in self._chains:
                chain.extend(tokens)
        except Unkeyable:
            self._engine.metrics.add("lmcache_unkeyed_requests_total")
            raise

    @_timed("lookup")
    def lookup(self, *, local: int = 0, deadline: float | None = None) -> int:
        """Lease what the cache can supply and return the token position it reaches.

        At least one token is left to compute. Asking again gives the same answer, until ``load`` has used
        it up or ``end`` was called: then it is 0.

        Args:
            local: tokens the engine has by itself; an offer that does not go beyond them is 0.
            deadline: clock time by which the answer is needed.
        """
        return self._reach(local, deadline)

    @_timed("load")
    def load(self, surface: Surface, /, *, local: int = 0) -> int:
        """Copy the offer into engine memory from the chunk around ``local`` on, and release it.

        Returns the token position up to which memory is good; what lies beyond must be computed. A chunk
        that fails verification ends the load there and is deleted everywhere. Engine memory must have room
        up to ``room``; tokens of the chunk around ``local`` are written again, so that damage there makes
        the answer less than ``local``.

        Raises:
            ValueError: from the surface, about positions it does not have; the offer is released.
        """
        reach = self._reach(local, None)
        offer, self._offer = self._offer, None
        if offer is None:
            return local
        engine, good = self._engine, local
        try:
            bad = self._copy(offer, surface, local) if reach else None
            if bad is None:
                good = max(local, reach)
            else:
                rules = {group.reuse for group in engine.forms.space.groups}
                good = bad.first
                if Reuse.POINT in rules:
                    good = 0  # the state of the engine's own prefix may be gone
                elif Reuse.WINDOW in rules:
                    good = min(local, good)  # the window is whole at the end only
                self.reason = Reason.DAMAGED
                engine.client.delete([bad.key])
        finally:
            engine.client.release(offer.leases)
            engine.metrics.add("lmcache_loaded_tokens_total", max(0, good - local))
            engine.metrics.add("lmcache_failed_load_tokens_total", max(0, reach - good))
        return good

    @_timed("store")
    def store(self, surface: Surface, computed: int, /) -> Saved:
        """Copy the chunks among the first ``computed`` tokens that the cache lacks out of engine memory.

        Args:
            computed: tokens whose KV is good in engine memory, from the start of the request.
        """
        engine = self._engine
        computed = min(computed, self.tokens)
        if self.state is State.ENDED or self._skip_save:
            return Saved(0, 0)
        if computed < engine.options.min_store_tokens:
            return Saved(0, 0)
        spans = self._spans(self._chains[-1], whole=computed == self.tokens)
        spans = [span for span in spans if span[1] + span[2] <= computed]
        space = self._space.digest
        wants = [
            Wanted(Key(space, digest, group), group, first, count)
            for digest, first, count in spans
            for group in range(engine.forms.groups)
        ]
        return self._save(wants, surface)

    @_timed("end")
    def end(self) -> None:
        """Let everything go: finished, aborted or preempted, at any point, any number of times."""
        self.state = State.ENDED
        offer, self._offer = self._offer, None
        if offer is not None:
            self._engine.client.release(offer.leases)
        for reservation in self._open:
            self._engine.client.abort(reservation)
        self._open.clear()

    def _reach(self, local: int, deadline: float | None) -> int:
        options = self._engine.options
        if self.state is State.NEW and not self._skip_load:
            self._offer = self._ask(deadline)
            self._offer.reach = min(self._offer.tokens, self.tokens - 1)
            self.state = State.OFFERED
        reach = self._offer.reach if self._offer is not None else 0
        return reach if reach - local >= max(1, options.min_retrieve_tokens) else 0

    def _spans(self, chain: Chain, *, whole: bool) -> list[Span]:
        """The full chunks, and with ``whole`` the tail where it is kept too."""
        size = chain.chunk_tokens
        spans = [(digest, i * size, size) for i, digest in enumerate(chain.digests)]
        done = len(spans) * size
        if whole and self._engine.options.save_partial and self._engine.forms.partial:
            tail = chain.partial()
            if tail is not None:
                spans.append((tail, done, chain.tokens - done))
        return spans

    def _ask(self, deadline: float | None) -> _Offer:
        engine = self._engine
        offer = _Offer([], [], 0)
        limit = engine.options.max_tokens_per_load or self.tokens
        if any(group.reuse is Reuse.POINT for group in self._space.groups):
            limit = min(limit, self.tokens - 1)  # a state stands for all tokens of its chunk
        for space, chain in zip(self._space.readable, self._chains, strict=True):
            spans = self._spans(chain, whole=True)[offer.tokens // chain.chunk_tokens :]
            spans = [span for span in spans if span[1] + span[2] <= limit]
            if spans and not offer.tokens % chain.chunk_tokens:
                self._take(offer, space.digest, spans, deadline)
        engine.asked(self.tokens, offer.tokens)
        return offer

    def _take(
        self,
        offer: _Offer,
        space: bytes,
        spans: Sequence[Span],
        deadline: float | None,
    ) -> None:
        """Lease the longest legal run of ``spans`` and add it to the offer."""
        engine, groups = self._engine, self._space.groups
        count = len(spans)
        size = engine.forms.chunk_tokens
        missing: set[Key] = set()
        if any(group.window or group.reuse.value != "all" for group in groups):
            every = [Key(space, d, g) for d, _, _ in spans for g in range(len(groups))]
            places = engine.client.lookup(every, deadline=deadline, tokens=size).places
            missing = {key for key, place in zip(every, places, strict=True) if place is None}
            count = legal_end(spans, groups, space, missing)
        while count:
            wants = wanted(spans[:count], groups, space)
            loaded = engine.client.load(
                [want.key for want in wants], self, deadline=deadline, tokens=size
            )
            self.reason = loaded.reason
            got = len(loaded.leases)
            if got < len(wants):
                missing.add(wants[got].key)
                shorter = legal_end(spans[:count], groups, space, missing)
                kept = wanted(spans[:shorter], groups, space)
                if kept != wants[: len(kept)] or len(kept) > got:
                    engine.client.release(loaded.leases)
                    count = shorter
                    continue
                engine.client.release(loaded.leases[len(kept) :])
                wants, count = kept, shorter
            offer.wants += wants
            offer.leases += loaded.leases[: len(wants)]
            if count:
                offer.tokens = spans[count - 1][1] + spans[count - 1][2]
            return

    def _copy(self, offer: _Offer, surface: Surface, local: int) -> Wanted | None:
        """Copy every leased value that goes beyond ``local``; the first that is not good, if any."""
        engine = self._engine
        for want, lease in zip(offer.wants, offer.leases, strict=True):
            if want.first + want.tokens <= local or want.first >= offer.reach:
                continue
            verify = engine.verify_next()
            room = engine.forms.header_nbytes(want.group)
            digests: Sequence[bytes] = ()
            try:
                if verify or lease.view.nbytes != room + engine.nbytes(want):
                    # Tags make a header longer than usual; only the header knows then.
                    header = frame.open_header(lease.view, want.key)
                    room, digests = header.nbytes, header.digests if verify else ()
                    if header.spec != engine.forms.spec(want.group, want.tokens) or header.chain:
                        return want
            except Corrupt as error:
                engine.damaged(want.key, str(error))
                return want
            payload = lease.view[room : room + engine.nbytes(want)]
            seed = frame.seed_of(want.key)
            if not surface.unpack(want.group, want.first, want.tokens, payload, seed, digests):
                engine.damaged(want.key, "digest differs after the copy")
                return want
        return None

    def _save(self, wants: Sequence[Wanted], surface: Surface) -> Saved:
        engine = self._engine
        client, forms = engine.client, engine.forms
        rooms = {group: forms.header_nbytes(group, self._tags) for group in range(forms.groups)}
        answers = client.reserve(
            [(want.key, rooms[want.group] + engine.nbytes(want)) for want in wants],
            self,
            tenant=self._space.tenant,
            cost=self._cost,
            tags=self._tags,
        )
        self._open += [answer for answer in answers if not isinstance(answer, Refusal)]
        filled: list[tuple[int, Reservation, bytes]] = []
        stored = present = left = 0
        reason, broken = "", False
        for want, answer in zip(wants, answers, strict=True):
            tokens = want.tokens if want.group == 0 else 0
            if answer is Refusal.PRESENT:
                present += tokens
            elif isinstance(answer, Refusal):
                left, reason = left + tokens, reason or answer.value
            elif broken:
                left += tokens
            else:
                try:
                    identity = self._write(want, answer, surface, rooms[want.group])
                    filled.append((tokens, answer, identity))
                except ValueError as error:
                    left, reason = left + tokens, reason or str(error)
                    # Chunks behind it would never be reached; behind a gap in a window they are.
                    broken = forms.space.groups[want.group].reuse is Reuse.ALL
        if filled:
            done = client.commit_batch(
                [f[1] for f in filled], [f[2] for f in filled], ttl=self._ttl
            )
            stored = sum(f[0] for f, good in zip(filled, done, strict=True) if good)
            left += sum(f[0] for f in filled) - stored
        for reservation in self._open:
            client.abort(reservation)  # does nothing to what is committed
        self._open.clear()
        engine.metrics.add("lmcache_stored_tokens_total", stored)
        return Saved(stored, present, left, reason)

    def _write(self, want: Wanted, reservation: Reservation, surface: Surface, room: int) -> bytes:
        """Fill and seal a frame; returns its identity."""
        view = reservation.view
        seed = frame.seed_of(want.key)
        digests = surface.pack(want.group, want.first, want.tokens, view[room:], seed)
        return frame.seal(
            view[:room],
            want.key,
            spec=self._engine.forms.spec(want.group, want.tokens),
            digests=digests,
            tags=self._tags,
            created=self._engine.wall(),
            first=want.first,
        ).identity
