"""The stores of a worker: reserve, copy, commit, all within the step that computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from lmcache_core import frame
from lmcache_core.identity import KeySpace
from lmcache_core.spi import GPUConnector, Key, Refusal, Reservation
from lmcache_core.wire.client import DaemonClient
from lmcache_engine_vllm.breaker import Breaker
from lmcache_engine_vllm.layout import Kept, Ranks
from lmcache_engine_vllm.settings import LOG
from lmcache_engine_vllm.steps import Announced, Store, Tables
from lmcache_engine_vllm.tally import Tally


class Storing:
    """Args: as ``Worker``'s.

    Attributes:
        events: chunks that have become visible, for vLLM to publish.
    """

    def __init__(
        self,
        client: DaemonClient,
        engine: str,
        connector: GPUConnector,
        kept: Sequence[Kept],
        space: KeySpace,
        ranks: Ranks,
        breaker: Breaker,
        tally: Tally,
        timer: Callable[[], float],
    ) -> None:
        self.client = client
        self.connector = connector
        self.kept = kept
        self.space = space
        self.ranks = ranks
        self.breaker = breaker
        self.tally = tally
        self.events: list[Announced] = []
        self._engine = engine
        self._timer = timer
        self._stored: dict[str, tuple[int, float]] = {}

    def save(
        self,
        stores: Sequence[Store],
        tenant: str,
        tags: tuple[str, ...],
        bad: AbstractSet[int],
        turn: int,
    ) -> None:
        """Keep the chunks of some stores; ranks that fill them with us are told of the ``bad`` ones."""
        alone = self.ranks.world == 1
        if alone and not self.breaker.closed:
            return
        began, size, space = self._timer(), self.kept[0].form.tokens, self.space.digest
        wants: list[tuple[Store, int, Key]] = [
            (store, store.first + at * size, Key(space, digest, group))
            for store in stores
            for at, digest in enumerate(store.digests)
            for group in range(len(self.kept))
            if self._there(group, store.tables, store.first + at * size)
        ]
        once: dict[Key, tuple[Store, int, Key]] = {}
        for want in wants:  # two requests of one step may bring the same chunk
            once.setdefault(want[2], want)
        wants = [*once.values()]
        with self.breaker.watch(self.client):
            answers = self.client.reserve(
                [(key, self._room(key, tags) + self.kept[key.group].form.nbytes) for _, _, key in wants], None,
                tenant=tenant, tags=tags, deadline=self.breaker.deadline(),
                engine="" if alone else self._engine, turn=turn,
                firsts=() if alone else [first for _, first, _ in wants],
            )  # fmt: skip
        filled: list[Reservation] = []
        which: list[tuple[Store, int, Key]] = []
        said: list[bytes] = []
        tokens = dict.fromkeys((store.id for store in stores), 0)
        open_ = [answer for answer in answers if not isinstance(answer, Refusal)]
        try:
            for (store, first, key), answer in zip(wants, answers, strict=True):
                if isinstance(answer, Refusal) or id(store) in bad:
                    continue
                said.append(self._pack(store, first, key, answer, tags))
                filled.append(answer)
                which.append((store, first, key))
                tokens[store.id] += size if key.group == 0 else 0
        except ValueError as error:
            LOG.warning("not kept: %s", error)
        commit = self.client.commit_batch if alone else self.client.commit_parts
        done = commit(filled, said) if filled else []
        for each, good in zip(which, done, strict=True):
            if good:
                self._announce(*each)
        for reservation in open_:
            self.client.abort(reservation)  # does nothing to what is committed
        stored = sum(tokens.values()) if all(done) else sum(done) * size // len(self.kept)
        self.tally.add("lmcache_stored_tokens_total", stored)
        self._say_stored(stores, tokens, self._timer() - began)

    def _announce(self, store: Store, first: int, key: Key) -> None:
        if store.tokens and not key.group:
            size, begin = self.kept[0].form.tokens, first - store.first
            parent = store.digests[begin // size - 1] if begin else store.parent
            ids = [*store.tokens[begin : begin + size]]
            self.events.append(Announced([key.digest], parent, ids, size))

    def _there(self, group: int, tables: Tables, first: int) -> bool:
        """Whether all blocks of a chunk are still the request's."""
        block = self.kept[group].part.block
        return 0 not in tables[group][first // block : (first + self.kept[0].form.tokens) // block]

    def _room(self, key: Key, tags: tuple[str, ...]) -> int:
        kept = self.kept[key.group]
        if self.ranks.world > 1:
            return kept.room  # as registered; the daemon writes the header
        return frame.header_nbytes(len(kept.form.segments), tags=tags) if tags else kept.room

    def _pack(
        self, store: Store, first: int, key: Key, reservation: Reservation, tags: tuple[str, ...]
    ) -> bytes:
        """Fill one reservation; returns what is said when it is committed: its identity, or our digests."""
        kept = self.kept[key.group]
        view, seed = reservation.view, frame.seed_of(key)
        table, room = kept.blocks(store.tables[key.group]), self._room(key, tags)
        digests = b""
        for piece in kept.pieces if self.ranks.writes else ():
            into = view[room + piece.offset : room + piece.offset + piece.nbytes]
            copied = self.connector.pack(
                key.group, table, first, kept.form.tokens, into, seed=seed, layers=piece.layers
            ).wait()
            if copied is None or copied.digests is None:
                raise ValueError(f"{key!r} was not copied")
            digests += copied.digests
        if self.ranks.world > 1:
            return digests
        parts = [digests[at : at + 16] for at in range(0, len(digests), 16)]
        return frame.seal(
            view[: kept.room],
            key,
            spec=kept.form,
            digests=parts,
            tags=tags,
            created=int(time.time()),
            first=first,
        ).identity

    def _say_stored(
        self, stores: Sequence[Store], tokens: Mapping[str, int], seconds: float
    ) -> None:
        for store in stores:
            before, spent = self._stored.pop(store.id, (0, 0.0))
            now = (before + tokens[store.id], spent + seconds / len(stores))
            if not store.last:
                self._stored[store.id] = now
            elif not self.ranks.rank:
                LOG.info(
                    "Stored %d tokens in %.4f seconds (of %d total tokens of request %s)",
                    now[0], now[1], store.total, store.id,
                )  # fmt: skip

    def forget(self, ids: Iterable[str]) -> None:
        """These requests are over."""
        for id in ids:
            self._stored.pop(id, None)
