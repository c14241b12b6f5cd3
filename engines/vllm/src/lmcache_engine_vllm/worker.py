"""A worker's half: copies between the engine's blocks and the cache's memory.

It trusts nothing it is told about the past: leases may be lost, memory may have gone to another value, the daemon
may be another one. What could not be filled is reported; what might rest on it is not kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from lmcache_core import frame
from lmcache_core.config import VerifyHot
from lmcache_core.identity import KeySpace, canonical
from lmcache_core.spi import GPUConnector, Reuse
from lmcache_core.spi.errors import BackendError, ConfigError, Corrupt
from lmcache_core.wire import records, replies
from lmcache_core.wire.client import DaemonClient
from lmcache_core.wire.grants import Home, RemoteLeases
from lmcache_engine_vllm.breaker import Breaker
from lmcache_engine_vllm.canary import close
from lmcache_engine_vllm.layout import Kept, Ranks
from lmcache_engine_vllm.settings import LOG, Settings
from lmcache_engine_vllm.steps import Load, Step, Store, Tables
from lmcache_engine_vllm.storing import Batch, Storing
from lmcache_engine_vllm.tally import Tally

SAMPLE = 64
"""One load out of so many is verified under ``VerifyHot.SAMPLE``."""


class Worker:
    """Args:
    connector: bound to the engine's memory.
    kept: how each part is stored.
    space: what the KV of this engine is valid for.
    """

    def __init__(
        self,
        client: DaemonClient,
        settings: Settings,
        connector: GPUConnector,
        kept: Sequence[Kept],
        space: KeySpace,
        ranks: Ranks,
        *,
        verify: VerifyHot,
        tally: Tally,
    ) -> None:
        self.client = client
        self.settings = settings
        self.connector = connector
        self.kept = tuple(kept)
        self.space = space
        self.ranks = ranks
        self.tally = tally
        self.breaker = Breaker()
        self.failed: set[int] = set()
        """Blocks that hold nothing good, until they are filled or computed."""
        self.reports: set[int] = set()
        """Of them, those the engine was not told of yet."""
        self.step = Step()
        self._verify = verify
        self._seen = 0
        self._registered: Home | None = None
        self.arrived: set[str] = set()
        self.missed: set[str] = set()
        """Requests whose loads in the background have ended, and those of them that failed."""
        self.poisoned = False
        """What the cache had was not what is computed: it is used no more."""
        self.open: list[tuple[Load, RemoteLeases | None, set[int]]] = []
        self.visited: set[int] = set()
        self._layerwise = settings.layerwise
        """Loads that go on layer by layer during this forward pass, and the layers that are done."""
        self.batches: list[Batch] = []
        """Stores that are under way."""
        self.storing = Storing(
            client,
            settings.engine,
            connector,
            self.kept,
            space,
            ranks,
            self.breaker,
            self.tally,
        )
        self.register(self.client.now() + self.client.timeout)

    def register(self, until: float) -> None:
        """Tell the daemon who we are, once per session with it."""
        home, welcome = self.client.home, self.client.welcome
        if home is None or home is self._registered or not self.breaker.closed:
            return
        fidelity = welcome.fidelity if welcome is not None else "exact"
        if fidelity not in ("exact", self.space.fidelity):
            self._registered = home
            LOG.warning(
                "the daemon at %s has lossy tiers (%s), and this engine was started with %s ones: it runs without "
                "a cache until it is started again",
                self.client.address, fidelity, self.space.fidelity,
            )  # fmt: skip
            return
        forms = [kept.wire for kept in self.kept]
        writes = [list(kept.mine) if self.ranks.writes else [] for kept in self.kept]
        space, ranks = canonical(self.space), self.ranks
        try:
            with self.breaker.watch(self.client):
                self.client.ask(
                    replies.Registered,
                    lambda id: records.Register(
                        id, self.settings.engine, ranks.rank, ranks.world, space, forms, writes
                    ),
                    until,
                )
            self._registered = home
            if ranks.world > 1 and not ranks.rank and not home.writable:
                LOG.warning(
                    "nothing is stored: the %d ranks of this engine write in place, and memory of the daemon at %s "
                    "is sealed; start it with --arena-mode shared-rw",
                    ranks.world, self.client.address,
                )  # fmt: skip
        except ConfigError:
            self._registered = home  # asking again will not change it
            raise
        except BackendError as error:
            LOG.warning("not registered with the daemon: %s", error)

    # -- a step ------------------------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Take the orders of a step."""
        self.step = step
        self.register(self.breaker.deadline())

    def load(self) -> None:
        """Fill the blocks that this step's forward pass reads, or begin to."""
        while self.step.loads:
            load = self.step.loads[0]
            if self._layerwise and not load.background:
                self.open.append((load, self._adopt(load), set()))
            else:
                self._finish(load, self.fill(load))
            self.step.loads.pop(0)

    def layer(self, name: str) -> None:
        """Fill one layer of the loads that were begun."""
        number = next((each.numbers[name] for each in self.kept if name in each.numbers), None)
        if self.open and number is not None and number not in self.visited:
            self.visited.add(number)
            for load, leases, failed in self.open:
                if leases is not None and not failed:
                    failed |= self._fill(load, leases, number)[0]

    def _end_open(self) -> None:
        """After the forward pass. A layer that nobody waited for was read before it was filled."""
        if not self.open:
            return
        whole = all(self.visited >= {*kept.numbers.values()} for kept in self.kept)
        if not whole:
            self._layerwise = False
            LOG.warning("this engine calls no hook around some layers: loads go all layers at once")
        for load, leases, failed in self.open:
            self.client.release(leases or ())
            good = whole and leases is not None
            self._finish(load, failed if good else self._lost(load, load.first))
        self.open.clear()
        self.visited.clear()

    def fail(self) -> None:
        """Report everything that this step should have loaded and has not."""
        for load, leases, _ in self.open:
            self.client.release(leases or ())
            self._finish(load, self._lost(load, load.first))
        self.open.clear()
        for load in self.step.loads:
            leases = self.client.adopt(load.handle) if load.handle is not None else None
            self.client.release(leases or ())
            self._finish(load, self._lost(load, load.first))
        self.step.loads.clear()
        self._abandon()

    def fill(self, load: Load) -> set[int]:
        """Copy what is leased; returns the blocks that hold nothing good."""
        began = time.perf_counter()
        leases = self._adopt(load)
        if leases is None:
            return self._lost(load, load.first)
        try:
            failed, nbytes = self._fill(load, leases)
        finally:
            self.client.release(leases)
        if not self.ranks.rank:
            self._say_loaded(load, failed, nbytes, time.perf_counter() - began)
        return failed

    def _adopt(self, load: Load) -> RemoteLeases | None:
        leases = self.client.adopt(load.handle) if load.handle is not None else None
        if self.poisoned:
            self.client.release(leases or ())
            return None
        return leases

    def _fill(
        self, load: Load, leases: RemoteLeases, layer: int | None = None
    ) -> tuple[set[int], int]:
        """Blocks that failed, and bytes that did not."""
        nbytes, size = 0, self.kept[0].form.tokens
        for lease, spot in zip(leases, load.spots, strict=False):
            first, end = max(spot, load.first), min(spot + size, load.end)
            if self.kept[lease.key.group].part.reuse is Reuse.POINT:
                first, end = spot, spot + size  # all of it, however much of the chunk is there
            else:
                first = self._in_window(lease.key.group, load.tables, first, end)
            if first >= end:
                continue
            if not self._unpack(lease, spot, first, end, load, layer):
                self.client.delete([lease.key], deadline=self.breaker.deadline())
                return self._lost(load, first), nbytes
            nbytes += self.kept[lease.key.group].form.nbytes * (end - first) // size
        reach = load.spots[-1] + size if load.spots else 0
        return (self._lost(load, max(load.first, reach)) if reach < load.end else set()), nbytes

    def computed(self, name: str) -> None:
        """Keep one layer of what this step computes."""
        if self._layerwise and not self.poisoned:
            self._begin_stores()
            for batch in self.batches:
                self.storing.layer(batch, name)

    def save(self) -> None:
        """Keep what this step has computed."""
        self._end_open()
        for check in self.step.checks:
            self._compare(check)
        self.step.checks.clear()
        if self.poisoned:
            self._abandon()
            return
        self._begin_stores()
        bad = {
            id(store) for batch in self.batches for store in batch.stores if self._tainted(store)
        }
        while self.batches:
            self.storing.end(self.batches[0], bad)
            self.batches.pop(0)

    def taken(self) -> set[int]:
        """Blocks that failed since the last call."""
        reports, self.reports = self.reports, set()
        return reports

    # -- loads ---------------------------------------------------------------------------------------------------

    def _finish(self, load: Load, failed: set[int]) -> None:
        if load.background:
            self.arrived.add(load.id)
        if failed and len(self.kept) > 1:
            # Only the request as a whole can be named; nobody else has seen its blocks.
            self.missed.add(load.id)
            failed = set()
        else:
            self.failed -= self._lost(load, load.first)
            self.failed |= failed
            self.reports |= failed
        tokens = load.end - load.first
        lost = tokens if load.id in self.missed else len(failed) * self.kept[0].part.block
        self.tally.add("lmcache_loaded_tokens_total", max(0, tokens - lost))
        self.tally.add("lmcache_failed_load_tokens_total", min(tokens, lost))

    def _lost(self, load: Load, first: int) -> set[int]:
        """Blocks of a load from a token on; block 0 stands for positions that no window reaches."""
        lost = set[int]()
        for kept, table in zip(self.kept, load.tables, strict=True):
            block = kept.part.block
            lost.update(table[first // block : -(-load.end // block)])
        return lost - {0}

    def _unpack(
        self, lease: Any, spot: int, first: int, end: int, load: Load, layer: int | None = None
    ) -> bool:
        """Copy tokens [first, end) of one chunk that begins at token ``spot``; of one layer, or of all."""
        kept = self.kept[lease.key.group]
        view, form = lease.view, kept.form
        if not lease.current:
            return False
        room, header = kept.room, None
        if self._verify_next() or view.nbytes != room + form.nbytes:
            try:
                header = frame.open_header(view, lease.key)
            except Corrupt as error:
                LOG.warning("%s", error)
                return False
            if header.spec != form or header.chain:
                return False
            room = header.nbytes
        payload, seed = view[room:], frame.seed_of(lease.key)
        table, begin, count = kept.place(load.tables[lease.key.group], first, end - first)
        if table == [0]:
            return False
        whole = end - first == form.tokens
        for piece in kept.pieces if layer is None else kept.layer(layer):
            part = payload[piece.offset : piece.offset + piece.nbytes]
            if not whole:
                if header is not None and not kept.intact(part, piece, header):
                    LOG.warning("%r in memory is damaged", lease.key)
                    return False
                part = kept.cut(part, piece, first - spot, end - first)
            expected = None
            if header is not None and header.digests and whole:
                expected = b"".join(header.digests[n] for n in piece.mine)
            copied = self.connector.unpack(
                lease.key.group, table, begin, count, part,
                seed=seed if expected else None, digests=expected, layers=piece.layers,
            ).wait()  # fmt: skip
            if copied is None or copied.bad_segment >= 0:
                LOG.warning("%r in memory is damaged", lease.key)
                return False
        return bool(lease.current)

    def _in_window(self, group: int, tables: Tables, first: int, end: int) -> int:
        """The first position from ``first`` on that has a block of its own."""
        block = self.kept[group].part.block
        while first < end and not tables[group][first // block]:
            first = (first // block + 1) * block
        return first

    def _verify_next(self) -> bool:
        self._seen += 1
        rule = self._verify
        return rule is VerifyHot.ALWAYS or (rule is VerifyHot.SAMPLE and self._seen % SAMPLE == 1)

    # -- stores --------------------------------------------------------------------------------------------------

    def _begin_stores(self) -> None:
        stores, self.step.stores = self.step.stores, []
        for (tenant, tags), group in groupby(stores, key=lambda store: (store.tenant, store.tags)):
            self.batches.append(self.storing.begin([*group], tenant, tags, self.step.turn))

    def _abandon(self) -> None:
        self.step.stores.clear()
        for batch in self.batches:
            self.storing.abandon(batch)
        self.batches.clear()

    def _tainted(self, store: Store) -> bool:
        """Whether the chunks may rest on blocks that hold nothing good."""
        if not self.failed:
            return False
        for kept, table in zip(self.kept, store.tables, strict=True):
            own = -(-store.base // kept.part.block)
            if self.failed & {*table[:own]}:
                return True
        for kept, table in zip(self.kept, store.tables, strict=True):
            self.failed -= {*table[-(-store.base // kept.part.block) :]}
        return False

    def _compare(self, check: Load) -> None:
        """Compare what the cache has with what the engine has computed."""
        leases = self.client.adopt(check.handle) if check.handle is not None else None
        for lease, spot in zip(leases or (), check.spots, strict=False):
            kept = self.kept[lease.key.group]
            size = kept.form.tokens
            where = kept.place(check.tables[lease.key.group], spot, size)
            if spot + size > check.end:
                break
            same = True
            room = lease.view.nbytes - kept.form.nbytes
            for piece in kept.pieces:
                own = bytearray(piece.nbytes)
                self.connector.pack(
                    lease.key.group, *where, memoryview(own), layers=piece.layers
                ).wait()
                theirs = lease.view[room + piece.offset : room + piece.offset + piece.nbytes]
                same = same and close(own, theirs, kept.form.dtype)
            self.tally.add("lmcache_canary_tokens_total", size)
            if lease.current and not same:
                self.tally.add("lmcache_canary_differing_tokens_total", size)
                self.poisoned = True
                LOG.error(
                    "%r is not what was computed for tokens %d to %d of request %s: the cache is used no more",
                    lease.key, spot, spot + size, check.id,
                )  # fmt: skip
        self.client.release(leases or ())

    # -- for people ------------------------------------------------------------------------------------------------

    def _say_loaded(self, load: Load, failed: set[int], nbytes: int, seconds: float) -> None:
        wanted = load.end - load.first
        got = max(0, wanted - len(failed) * self.kept[0].part.block)
        LOG.info(
            "Retrieved %d out of %d required tokens (from %d total tokens) of request %s. "
            "size: %.4f GB, cost %.4f ms, throughput: %.4f GB/s",
            got, wanted, load.total, load.id, nbytes / 1e9, seconds * 1e3, nbytes / 1e9 / max(seconds, 1e-9),
        )  # fmt: skip
