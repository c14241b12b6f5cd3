"""One request's way through the cache.

States only ever move forward: *new*, *offered* (chunks are leased), *ended*. Every call is legal in every
state and may be repeated; what makes no sense any more does nothing. The leases belong to the request until
``load`` has copied them or ``end`` lets them go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from lmcache_core import frame
from lmcache_core.engine.client import Surface
from lmcache_core.engine.reuse import Wanted, legal_end, wanted
from lmcache_core.identity import Chain, Extra, Tokens
from lmcache_core.spi import Key, Lease, Refusal, Reservation
from lmcache_core.spi.errors import Corrupt
from lmcache_core.storage.results import Reason

if TYPE_CHECKING:
    from lmcache_core.engine.engine import CacheEngine


class State(Enum):
    """Where a request is."""

    NEW = "new"
    OFFERED = "offered"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Saved:
    """What became of a store, in tokens: ``stored + present + left = tokens of the full chunks``.

    ``reason`` says why ``left`` is not 0: ``"full"``, ``"pending"``, ``"unwanted"`` ...
    """

    stored: int
    present: int
    left: int = 0
    reason: str = ""


@dataclass(slots=True)
class _Offer:
    """Leased values in the order they are copied, and the token position they reach."""

    wants: list[Wanted]
    leases: list[Lease]
    tokens: int


class Request:
    """Made by ``CacheEngine.request``; one thread at a time.

    Attributes:
        id: the engine's name for it.
        state: see ``State``.
        reason: why the last lookup or load ended where it did.
    """

    def __init__(
        self,
        engine: CacheEngine,
        id: str,
        tokens: Tokens,
        /,
        *,
        extras: Iterable[Extra] = (),
        tags: Sequence[str] = (),
        skip_load: bool = False,
        skip_save: bool = False,
        cost: float = 1.0,
    ) -> None:
        self.id = id
        self.state = State.NEW
        self.reason = Reason.MISS
        self._engine = engine
        self._tags = tuple(tags)
        self._skip_load = skip_load
        self._skip_save = skip_save
        self._cost = cost
        self._chains = [
            Chain(space.root, engine.forms.chunk_tokens, extras=extras)
            for space in engine.forms.space.readable
        ]
        self._offer: _Offer | None = None
        self._open: list[Reservation] = []
        self.extend(tokens)

    @property
    def tokens(self) -> int:
        """Tokens known so far."""
        return self._chains[-1].tokens

    def extend(self, tokens: Tokens, /) -> None:
        """Append confirmed (generated) tokens; a lookup that was answered stays as it was."""
        for chain in self._chains:
            chain.extend(tokens)

    def lookup(self, *, local: int = 0, deadline: float | None = None) -> int:
        """Lease what the cache can supply and return the token position it reaches.

        At least one token is left to compute. Asking again gives the same answer.

        Args:
            local: tokens the engine has by itself; an offer that does not go beyond them is 0.
            deadline: clock time by which the answer is needed.
        """
        if self.state is State.NEW and not self._skip_load:
            self._offer = self._ask(deadline)
            self.state = State.OFFERED
        offer = self._offer
        if offer is None:
            return 0
        reach = min(offer.tokens, self.tokens - 1)
        gain = reach - local
        if gain <= 0 or gain < self._engine.options.min_retrieve_tokens:
            return 0
        return reach

    def load(self, surface: Surface, /, *, local: int = 0) -> int:
        """Copy the offer into engine memory from the chunk around ``local`` on, and release it.

        Returns the token position up to which memory is good; what lies beyond was not touched or must be
        computed. A chunk that fails verification ends the load there and is deleted everywhere.
        """
        reach = self.lookup(local=local)
        offer, self._offer = self._offer, None
        if offer is None:
            return local
        engine, good = self._engine, local
        try:
            if not reach:
                return local
            bad = self._copy(offer, surface, local)
            if bad is None:
                good = reach
            else:
                # A window or state group is needed at the end only: nothing before it counts then.
                whole = len(engine.forms.space.groups) == 1
                good = max(local, bad.first) if whole else local
                self.reason = Reason.DAMAGED
                engine.client.delete([bad.key])
        finally:
            engine.client.release(offer.leases)
        engine.metrics.add("lmcache_loaded_tokens_total", max(0, good - local))
        return good

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
        chain, size = self._chains[-1], engine.forms.chunk_tokens
        spans = [(d, i * size, size) for i, d in enumerate(chain.digests[: computed // size])]
        tail = chain.partial() if computed == self.tokens else None
        if tail is not None and engine.options.save_partial and engine.forms.partial:
            spans.append((tail, len(chain.digests) * size, computed - len(chain.digests) * size))
        space = engine.forms.space.digest
        wants = [
            Wanted(Key(space, digest, group), group, first, count)
            for digest, first, count in spans
            for group in range(engine.forms.groups)
        ]
        return self._save(wants, surface)

    def end(self) -> None:
        """Let everything go: finished, aborted or preempted, at any point, any number of times."""
        self.state = State.ENDED
        offer, self._offer = self._offer, None
        if offer is not None:
            self._engine.client.release(offer.leases)
        for reservation in self._open:
            self._engine.client.abort(reservation)
        self._open.clear()

    def _ask(self, deadline: float | None) -> _Offer:
        engine, forms = self._engine, self._engine.forms
        offer = _Offer([], [], 0)
        limit = engine.options.max_tokens_per_load
        for space, chain in zip(forms.space.readable, self._chains, strict=True):
            size = forms.chunk_tokens
            done = offer.tokens // size
            spans = [(d, i * size, size) for i, d in enumerate(chain.digests)][done:]
            tail = chain.partial()
            if tail is not None and engine.options.save_partial and forms.partial:
                spans.append(
                    (tail, len(chain.digests) * size, self.tokens - len(chain.digests) * size)
                )
            if limit is not None:
                spans = [span for span in spans if span[1] + span[2] <= limit]
            if offer.tokens % size or not spans:
                continue
            self._take(offer, space.digest, spans, deadline)
        engine.asked(self.tokens, offer.tokens)
        return offer

    def _take(
        self,
        offer: _Offer,
        space: bytes,
        spans: Sequence[tuple[bytes, int, int]],
        deadline: float | None,
    ) -> None:
        """Lease the longest legal run of ``spans`` and add it to the offer."""
        engine, groups = self._engine, self._engine.forms.space.groups
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
            if want.first + want.tokens <= local:
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
            tenant=forms.space.tenant,
            cost=self._cost,
            tags=self._tags,
        )
        self._open += [answer for answer in answers if not isinstance(answer, Refusal)]
        stored = present = left = 0
        reason = ""
        for want, answer in zip(wants, answers, strict=True):
            tokens = want.tokens if want.group == 0 else 0
            if answer is Refusal.PRESENT:
                present += tokens
            elif isinstance(answer, Refusal):
                left, reason = left + tokens, reason or answer.value
            elif reason not in ("", Refusal.PENDING.value):
                # A chunk behind one that could not be kept would never be reached.
                client.abort(answer)
                left += tokens
            else:
                try:
                    kept = self._write(want, answer, surface, rooms[want.group])
                except ValueError as error:
                    client.abort(answer)
                    kept, reason = False, str(error)
                stored, left = stored + tokens * kept, left + tokens * (not kept)
        self._open.clear()
        engine.metrics.add("lmcache_stored_tokens_total", stored)
        return Saved(stored, present, left, reason)

    def _write(self, want: Wanted, reservation: Reservation, surface: Surface, room: int) -> bool:
        view = reservation.view
        seed = frame.seed_of(want.key)
        digests = surface.pack(want.group, want.first, want.tokens, view[room:], seed)
        header = frame.seal(
            view[:room],
            want.key,
            spec=self._engine.forms.spec(want.group, want.tokens),
            digests=digests,
            tags=self._tags,
            created=self._engine.wall(),
        )
        return self._engine.client.commit(reservation, header.identity)
