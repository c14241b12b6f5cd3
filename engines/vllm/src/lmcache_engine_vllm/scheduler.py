"""The scheduler's half: what is offered to each request, and what of it is kept.

One record per request, ``Asked``. Its leases are an offer until ``build`` has handed them to the ranks; before
that, finishing, asking anew or a smaller grant lets them go. Every call is legal in every state and may come
again; what makes no sense any more does nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lmcache_core.config import EngineConfig
from lmcache_core.engine.reuse import Span, Wanted, legal_end, wanted
from lmcache_core.identity import Chain, KeyManager, Unkeyable
from lmcache_core.spi import Key, Reuse
from lmcache_core.storage.results import Reason
from lmcache_core.wire.client import DaemonClient
from lmcache_core.wire.grants import RemoteLeases
from lmcache_engine_vllm.asked import Asked
from lmcache_engine_vllm.breaker import Breaker, Trust
from lmcache_engine_vllm.groups import Part, filled, tables
from lmcache_engine_vllm.identity import wishes
from lmcache_engine_vllm.names import Names
from lmcache_engine_vllm.settings import Settings
from lmcache_engine_vllm.steps import Load, Step, Store, Tables
from lmcache_engine_vllm.tally import Tally

AGAIN = 0.25
"""Seconds after which a miss is looked up once more for a request that still waits."""
RESIDENT = 0.002
"""Seconds in which the daemon hands out what it has at hand."""
PATIENCE = 2.0
"""Longest wait of one request for lower tiers, in seconds, all its preemptions together."""


class Scheduler:
    """Args:
    parts: the engine's groups that are kept.
    chunk: tokens of one, as long as the ranks say nothing else.
    ranks: of the engine.
    managers: key managers by name.
    """

    def __init__(
        self,
        client: DaemonClient,
        settings: Settings,
        options: EngineConfig,
        parts: Sequence[Part],
        chunk: int,
        ranks: int,
        *,
        managers: Mapping[str, KeyManager],
        tally: Tally,
    ) -> None:
        self.client = client
        self.settings = settings
        self.options = options
        self.parts = tuple(parts)
        self.tally = tally
        self.breaker = Breaker()
        self.trust = Trust()
        self.ranks = ranks
        self.names = Names(client, settings.engine, ranks, self.breaker, chunk)
        self.states: dict[str, Asked] = {}
        self.page = max(part.block for part in parts)
        self.whole = any(part.reuse is not Reuse.ALL for part in parts)
        """A hit is taken to its end or not at all: windows and states are kept for that end only."""
        self.background = settings.background or len(parts) > 1
        """Loads happen while the request waits: only so can one of several groups fail."""
        self._managers = managers
        self._turn = 0
        self._step = Step()
        self._waiting: list[str] = []

    @property
    def chunk(self) -> int:
        """Tokens of one."""
        return self.names.chunk

    # -- a request waits -----------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """It may be long until its turn: have lower tiers bring up its values meanwhile, if that is wanted."""
        if not (self.settings.eager and self.settings.loads and self.breaker.closed):
            return
        asked = self._asked(request)
        if asked is None or not self.trust.given:
            return
        parts: Any = self.parts
        wants = wanted(self._spans(asked), parts, self.names.space)
        with self.breaker.watch(self.client):  # when its turn comes it is asked about as any other
            self.client.prefetch([want.key for want in wants], PATIENCE, tokens=self.chunk)

    def matched(self, request: Any, local: int) -> int | None:
        """Tokens the cache supplies beyond the ``local`` ones; the same when asked again.

        None: ask again later, lower tiers are bringing up more.
        """
        asked = self._asked(request)
        if asked is None:
            return 0
        asked.plan, asked.base, asked.computed, asked.tables = None, None, 0, None
        asked.local = local
        if self.settings.loads and not self._ask(asked):
            return None
        if asked.probe is None and asked.leases is not None:
            asked.probe = not self.whole and random.random() < self.settings.canary
        if asked.probe:
            return 0
        reach = min(asked.reach, request.num_tokens - 1)
        if self.whole:
            reach = asked.reach if asked.reach == reach else 0
        more = reach - reach % self.page - local
        return more if more >= max(1, self.options.min_retrieve_tokens) else 0

    def allocated(
        self, id: str, external: int, found: Sequence[Sequence[int]] | None = None
    ) -> None:
        """The engine has taken ``external`` tokens of the offer, and has blocks for them.

        Args:
            found: its block tables, where it tells them; needed for loads in the background.
        """
        asked = self.states.get(id)
        if asked is None:
            return
        if external > 0 and asked.leases is not None:
            asked.plan = (asked.local, asked.local + external)
            if self.whole and asked.plan[1] != asked.reach:
                # What a window or a state needs at another end was not leased: all of it is lost.
                self.client.release(asked.leases)
                asked.leases = None
            if self.background and found is not None:
                asked.tables = tuple(tuple(found[part.index]) for part in self.parts)
                self._waiting.append(id)
        elif asked.plan is None and not asked.probe:
            self._let_go(asked)

    def bypass(self, ids: Iterable[str]) -> None:
        """Loads of these requests have failed; they are computed."""
        for id in ids:
            asked = self.states.get(id)
            if asked is not None:
                self._let_go(asked)
                asked.until = float("inf")

    def finished(self, id: str) -> None:
        """The request is over, in whatever state."""
        asked = self.states.pop(id, None)
        if asked is not None:
            self._let_go(asked)
            for leases in asked.held:
                self.client.release(leases)

    def reset(self) -> None:
        """Weights have changed: from now on nothing that was kept before is found.

        Requests that run on keep nothing any more; they mix both.
        """
        self.names.renew()
        self.close()

    # -- a step ----------------------------------------------------------------------------------------------

    def build(self, out: Any) -> Step:
        """What the workers do in this step, from vLLM's ``SchedulerOutput``."""
        self._turn += 1
        step = self._step = Step(self._turn)
        self._background(step)
        new, cached = out.scheduled_new_reqs, out.scheduled_cached_reqs
        for each in new:
            self._advance(step, out, each.req_id, each.num_computed_tokens)
        for id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._advance(step, out, id, computed)
        self._step = Step(self._turn)
        return step

    def lost(self, out: Any) -> Step:
        """Instead of ``build``, or after it has failed: what was promised and not dispatched is reported lost.

        What this step has dispatched goes with it, and never again: the blocks are another's later.
        """
        step, self._step = Step(self._turn, self._step.loads), Step(self._turn)
        self._background(step, lost=True)
        for id in out.num_scheduled_tokens:
            asked = self.states.get(id)
            if asked is not None and asked.plan is not None and asked.tables is None:
                step.loads.append(self._load(asked, None, tables(self.parts, out, id)))
        self.close()
        return step

    def close(self) -> None:
        """Let everything go."""
        for id in list(self.states):
            self.finished(id)

    def _background(self, step: Step, *, lost: bool = False) -> None:
        while self._waiting:  # one is off the list when its load is ordered: an error strands none
            asked = self.states.get(self._waiting[0])
            if asked is not None and asked.plan is not None and asked.tables is not None:
                tables = asked.tables
                step.loads.append(
                    self._load(asked, None, tables) if lost else self._dispatch(asked, tables)
                )
            self._waiting.pop(0)

    def _advance(self, step: Step, out: Any, id: str, computed: int) -> None:
        asked = self.states.get(id)
        if asked is None:
            return
        if asked.plan is not None:
            step.loads.append(self._dispatch(asked, tables(self.parts, out, id)))
        if asked.base is None or computed < asked.base:
            asked.base = computed
        if computed < asked.computed:
            asked.kept = min(asked.kept, computed // self.chunk)
        asked.computed = computed + out.num_scheduled_tokens.get(id, 0)
        if asked.probe and asked.leases is not None and asked.computed >= asked.reach:
            asked.probe, asked.plan = False, (0, asked.reach)
            step.checks.append(self._dispatch(asked, tables(self.parts, out, id)))
        self._store(step, out, id, asked, computed)

    def _store(self, step: Step, out: Any, id: str, asked: Asked, computed: int) -> None:
        if not self.settings.stores or asked.wishes.skip_save:
            return
        end = min(asked.computed, asked.fill - self.settings.skip_last)
        if self.options.save_decode and computed >= asked.fill:
            # Ids of this step are guesses yet; the last confirmed one was not computed before it.
            end = max(end, min(computed, asked.request.num_tokens - 1))
        if asked.wishes.most is not None:
            end = min(end, asked.wishes.most)
        chunks = end // self.chunk
        if chunks <= asked.kept or end < self.options.min_store_tokens:
            return
        if chunks > len(asked.chain.digests):
            self._extend(asked)
            chunks = min(chunks, len(asked.chain.digests))
        if not self.names.space or chunks <= asked.kept:
            return
        first, events = asked.kept, self.settings.events
        step.stores.append(
            Store(
                id,
                tuple(asked.chain.digests[first:chunks]),
                first * self.chunk,
                asked.base or 0,
                filled(self.parts, out, id, chunks * self.chunk),
                asked.wishes.tenant,
                asked.wishes.tags,
                asked.request.num_tokens,
                asked.computed >= asked.fill and not asked.told,
                tuple(asked.request.all_token_ids[first * self.chunk : chunks * self.chunk])
                if events
                else (),
                asked.chain.digests[first - 1] if events and first else None,
                asked.wishes.lora,
            )
        )
        asked.told = asked.told or asked.computed >= asked.fill
        asked.kept = chunks

    def _dispatch(self, asked: Asked, tables: Tables) -> Load:
        handle, leases = None, asked.leases
        if leases is not None:
            handle = self.client.dispatch(self.settings.engine, leases, self.ranks)
            if handle is None:
                # The daemon is gone or deaf. Its memory is mapped at the ranks and, while we hold the
                # leases, nobody else's; they compare generations around the copy.
                keys, words = tuple(leases.keys), leases.words.tobytes()
                handle = (leases.home.boot, 0, keys, words, leases.identities)
                asked.held.append(leases)
        load = self._load(asked, handle, tables)
        asked.leases, asked.plan, asked.tables, asked.reach = None, None, None, 0
        return load

    def _load(self, asked: Asked, handle: Any, tables: Tables) -> Load:
        assert asked.plan is not None
        first, end = asked.plan
        return Load(
            asked.request.request_id, handle, asked.spots, first, end, asked.request.num_tokens,
            tables, asked.tables is not None,
        )  # fmt: skip

    # -- asking ------------------------------------------------------------------------------------------------

    def _asked(self, request: Any) -> Asked | None:
        """The record of a request, its chain as long as its tokens; None when it cannot be keyed."""
        if not self.names.ready():
            return self.states.get(request.request_id)
        asked = self.states.get(request.request_id)
        if asked is None:
            try:
                wish = wishes(request, self.options, self._managers)
            except Unkeyable:
                self.tally.add("lmcache_unkeyed_requests_total")
                return None
            asked = Asked(request, wish, Chain(self.names.root, self.chunk, extras=wish.extras))
            self.states[request.request_id] = asked
        asked.fill = request.num_tokens
        return asked if self._extend(asked) else None

    def _extend(self, asked: Asked) -> bool:
        known = asked.request.all_token_ids
        try:
            if len(known) > asked.chain.tokens:
                asked.chain.extend(known[asked.chain.tokens :])
        except Unkeyable:
            self.finished(asked.request.request_id)
            self.tally.add("lmcache_unkeyed_requests_total")
            return False
        return True

    def _ask(self, asked: Asked) -> bool:
        """Put on offer what the cache has. False: not yet."""
        now, size = time.monotonic(), self.chunk
        if asked.leases is not None and self.client.home not in (None, asked.leases.home):
            self._let_go(asked)  # its daemon has a successor, and no rank need remember it
        if asked.over is not None:
            if now < (asked.patience or 0.0) and not asked.over():
                return False
            asked.over = None
        elif asked.leases is not None or now < asked.until:
            return True
        asked.reach, asked.spots = 0, ()
        asked.until = now + AGAIN
        spans = self._spans(asked)
        if spans and self.breaker.closed and self.trust.given:
            with self.breaker.watch(self.client):
                if self._lease(asked, spans):
                    return False
        asked.kept = asked.reach // size
        tokens = asked.chain.tokens
        self.tally.add("lmcache_lookups_total")
        self.tally.add("lmcache_asked_tokens_total", tokens)
        self.tally.add("lmcache_hit_tokens_total", asked.reach)
        self.tally.add("lmcache_missed_tokens_total", tokens - asked.reach)
        return True

    def _spans(self, asked: Asked) -> list[Span]:
        """What may be loaded for a request."""
        size, limit = self.chunk, self.options.max_tokens_per_load
        spans = [(digest, at * size, size) for at, digest in enumerate(asked.chain.digests)]
        return spans if limit is None else [span for span in spans if span[1] + size <= limit]

    def _bring_up(self, asked: Asked, keys: Sequence[Key]) -> bool:
        """Have lower tiers bring up values, once per request. False: it has waited for that already."""
        if asked.patience is not None:
            return False
        asked.patience = time.monotonic() + PATIENCE
        asked.over = self.client.prefetch(keys, PATIENCE, tokens=self.chunk)
        return True

    def _lease(self, asked: Asked, spans: Sequence[Span]) -> bool:
        """Lease what the longest legal hit over ``spans`` needs, and put it on offer. True: not yet."""
        space, count, missing = self.names.space, len(spans), set[Key]()
        parts: Any = self.parts  # a part says of its reuse what a group of the key space does
        if self.whole:
            count = min(count, (asked.request.num_tokens - 1) // self.chunk)
            every = [
                Key(space, digest, n) for digest, _, _ in spans[:count] for n in range(len(parts))
            ]
            found = self.client.lookup(every, deadline=self.breaker.deadline(), tokens=self.chunk)
            missing = {key for key, place in zip(every, found.places, strict=True) if place is None}
            count = legal_end(spans[:count], parts, space, missing)
        while count:
            wants: list[Wanted] = wanted(spans[:count], parts, space)
            loaded = self.client.load(
                [want.key for want in wants], None, deadline=self.breaker.deadline(),
                tokens=self.chunk, tenant=asked.wishes.tenant, seconds=RESIDENT,
            )  # fmt: skip
            leases = loaded.leases
            if loaded.reason is Reason.DEADLINE and self.client.trouble is not Reason.DEADLINE:
                late = [want.key for want in wants[len(leases) :]]
                if self._bring_up(asked, late):
                    self.client.release(leases)
                    return True
            if not isinstance(leases, RemoteLeases) or leases.values is not None:
                self.client.release(leases)  # streamed to here; the ranks are elsewhere
                return False
            if len(leases) == len(wants) or (leases and not self.whole):
                asked.leases = leases
                asked.spots = tuple(want.first for want in wants[: len(leases)])
                asked.reach = asked.spots[-1] + self.chunk
                return False
            self.client.release(leases)
            if not self.whole:
                return False
            missing.add(wants[len(leases)].key)
            count = legal_end(spans[:count], parts, space, missing)
        return False

    def _let_go(self, asked: Asked) -> None:
        leases, asked.leases = asked.leases, None
        asked.plan, asked.reach, asked.spots, asked.until, asked.over = None, 0, (), 0.0, None
        if leases is not None:
            self.client.release(leases)
