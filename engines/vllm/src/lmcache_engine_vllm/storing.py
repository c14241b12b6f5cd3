"""The stores of a worker: reserve, copy, commit, all within the step that computed.

What is copied layer by layer is reserved when the first layer is computed and committed when the last one is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from lmcache_core import frame
from lmcache_core.identity import KeySpace
from lmcache_core.spi import GPUConnector, Key, Refusal, Reservation, Reuse
from lmcache_core.wire.client import DaemonClient
from lmcache_engine_vllm.breaker import Breaker
from lmcache_engine_vllm.layout import Kept, Piece, Ranks
from lmcache_engine_vllm.settings import LOG
from lmcache_engine_vllm.steps import Announced, Store, Tables
from lmcache_engine_vllm.tally import Tally


@dataclass(slots=True)
class Want:
    """One chunk of one part, and what of it is copied: the digest of each segment, by position."""

    store: Store
    first: int
    key: Key
    reservation: Reservation | None = None
    digests: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class Batch:
    """Stores that share a tenant and tags, between ``begin`` and ``end``.

    Attributes:
        names: layers that were computed since.
        seconds: spent so far.
    """

    stores: Sequence[Store]
    tags: tuple[str, ...]
    wants: list[Want] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    seconds: float = 0.0


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
        self._stored: dict[str, tuple[int, float]] = {}

    def begin(
        self, stores: Sequence[Store], tenant: str, tags: tuple[str, ...], turn: int
    ) -> Batch:
        """Reserve room for the chunks of some stores of one step."""
        alone = self.ranks.world == 1
        batch = Batch(stores, tags)
        if alone and not self.breaker.closed:
            return batch
        began, size, space = time.perf_counter(), self.kept[0].form.tokens, self.space.digest
        once: dict[Key, Want] = {}
        for store in stores:  # two requests of one step may bring the same chunk
            for at, digest in enumerate(store.digests):
                for group in range(len(self.kept)):
                    key, first = Key(space, digest, group), store.first + at * size
                    if key not in once and self._there(group, store.tables, first):
                        once[key] = Want(store, first, key)
        wants = [*once.values()]
        with self.breaker.watch(self.client):
            answers = self.client.reserve(
                [(want.key, self._room(want.key, tags) + self.kept[want.key.group].form.nbytes) for want in wants],
                None, tenant=tenant, tags=tags, deadline=self.breaker.deadline(),
                engine="" if alone else self._engine, turn=turn,
                firsts=() if alone else [want.first for want in wants],
            )  # fmt: skip
        for want, answer in zip(wants, answers, strict=True):
            if not isinstance(answer, Refusal):
                want.reservation = answer
                batch.wants.append(want)
        batch.seconds += time.perf_counter() - began
        return batch

    def layer(self, batch: Batch, name: str) -> None:
        """Copy what is whole with one more layer; again when the engine computes it once more."""
        began = time.perf_counter()
        batch.names.add(name)
        whole = {
            group: kept.layer(kept.numbers[name])
            for group, kept in enumerate(self.kept)
            if name in kept.numbers and batch.names >= kept.names(kept.numbers[name])
        }
        for want in batch.wants:
            if want.key.group in whole:
                self._copy(want, whole[want.key.group], batch.tags)
        batch.seconds += time.perf_counter() - began

    def end(self, batch: Batch, bad: AbstractSet[int]) -> None:
        """Copy what is missing, and let others see all but the ``bad`` stores."""
        began, size = time.perf_counter(), self.kept[0].form.tokens
        filled: list[Reservation] = []
        which: list[Want] = []
        said: list[bytes] = []
        tokens = dict.fromkeys((store.id for store in batch.stores), 0)
        try:
            for want in batch.wants:
                if id(want.store) in bad or want.reservation is None:
                    continue
                said.append(self._seal(want, batch.tags))
                filled.append(want.reservation)
                which.append(want)
                tokens[want.store.id] += size if want.key.group == 0 else 0
        except ValueError as error:
            LOG.warning("not kept: %s", error)
        alone = self.ranks.world == 1
        commit = self.client.commit_batch if alone else self.client.commit_parts
        done = commit(filled, said) if filled else []
        for want, good in zip(which, done, strict=True):
            if good:
                self._announce(want)
        self.abandon(batch)  # does nothing to what is committed
        stored = sum(tokens.values()) if all(done) else sum(done) * size // len(self.kept)
        self.tally.add("lmcache_stored_tokens_total", stored)
        self._say_stored(batch.stores, tokens, batch.seconds + time.perf_counter() - began)

    def abandon(self, batch: Batch) -> None:
        """Give back what was reserved."""
        for want in batch.wants:
            if want.reservation is not None:
                self.client.abort(want.reservation)

    def _announce(self, want: Want) -> None:
        store = want.store
        if store.tokens and not want.key.group:
            size, begin = self.kept[0].form.tokens, want.first - store.first
            parent = store.digests[begin // size - 1] if begin else store.parent
            ids = [*store.tokens[begin : begin + size]]
            number, name = store.lora
            self.events.append(
                Announced([want.key.digest], parent, ids, size, lora_id=number, lora_name=name)
            )

    def _there(self, group: int, tables: Tables, first: int) -> bool:
        """Whether all blocks of a chunk are still the request's."""
        kept, size = self.kept[group], self.kept[0].form.tokens
        if kept.part.reuse is Reuse.POINT:
            return kept.place(tables[group], first, size)[0] != [0]
        block = kept.part.block
        return 0 not in tables[group][first // block : (first + size) // block]

    def _room(self, key: Key, tags: tuple[str, ...]) -> int:
        kept = self.kept[key.group]
        if self.ranks.world > 1:
            return kept.room  # as registered; the daemon writes the header
        return frame.header_nbytes(len(kept.form.segments), tags=tags) if tags else kept.room

    def _copy(self, want: Want, pieces: Sequence[Piece], tags: tuple[str, ...]) -> None:
        kept, key = self.kept[want.key.group], want.key
        assert want.reservation is not None
        view, seed = want.reservation.view, frame.seed_of(key)
        room = self._room(key, tags)
        where = kept.place(want.store.tables[key.group], want.first, kept.form.tokens)
        for piece in pieces if self.ranks.writes else ():
            into = view[room + piece.offset : room + piece.offset + piece.nbytes]
            copied = self.connector.pack(
                key.group, *where, into, seed=seed, layers=piece.layers
            ).wait()
            if copied is None or copied.digests is None:
                raise ValueError(f"{key!r} was not copied")
            cut = range(0, len(copied.digests), 16)
            want.digests |= {
                n: copied.digests[at : at + 16] for n, at in zip(piece.mine, cut, strict=True)
            }

    def _seal(self, want: Want, tags: tuple[str, ...]) -> bytes:
        """Complete one reservation; returns what is said when it is committed: its identity, or our digests."""
        kept, key = self.kept[want.key.group], want.key
        if not want.digests:
            self._copy(want, kept.pieces, tags)
        lacking = {kept.form.segments[n].layer for n in kept.mine if n not in want.digests}
        for number in sorted(lacking) if self.ranks.writes else ():
            self._copy(want, kept.layer(number), tags)
        digests = [want.digests[n] for n in sorted(want.digests)]
        if self.ranks.world > 1:
            return b"".join(digests)
        assert want.reservation is not None
        return frame.seal(
            want.reservation.view[: self._room(key, tags)],
            key,
            spec=kept.form,
            digests=digests,
            tags=tags,
            created=int(time.time()),
            first=want.first,
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
