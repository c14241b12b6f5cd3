"""The tier: batches over calls that block, and what ends them early."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from lmcache_backend_mooncake import admin, native
from lmcache_backend_mooncake.client import Client, Flight
from lmcache_backend_mooncake.config import MooncakeConfig
from lmcache_core.spi import (
    BackendError,
    BlockingBackend,
    Capabilities,
    Closed,
    Context,
    Durability,
    Found,
    Key,
    Load,
    Loaded,
    LoadStatus,
    Region,
    ScanPage,
    Store,
    Stored,
    StoreStatus,
    Unavailable,
    Usage,
)

PROBE_NBYTES = 1 << 20
AGAIN_S = 0.05
"""Between two cuts: a call that was about to connect is not ended by the first."""


class MooncakeBackend(BlockingBackend):
    """Values as objects in the segments that the nodes of a Mooncake store lend it.

    Values move between a segment and the caller's memory, registered or not, without a copy here. A call ends when
    the library touches that memory no more, and a cancelled one is ended by cutting its connections. The master
    evicts by itself, so a lookup is a hint.
    """

    config_type: ClassVar[type] = MooncakeConfig
    config: MooncakeConfig

    def __init__(self, config: MooncakeConfig, context: Context, /) -> None:
        super().__init__(config, context)
        self._client: Client | None = None
        self._listing: list[str] = []
        lent = bool(config.segment)  # what lies in it ends with this process
        self.capabilities = Capabilities(
            scan=bool(config.admin),
            usage=bool(config.admin),
            shared=True,
            persistent=not lent,
            hints=True,
            register=True,
            remote_lease=True,
            durability=Durability.NONE if lent else Durability.PROCESS,
            quiescence_s=config.timeout + 5.0,
        )

    @staticmethod
    def connect(config: MooncakeConfig) -> tuple[Any, Any]:
        """The library's client, and what tells it where values go."""
        return native.connect(config)

    @classmethod
    def unavailable(cls) -> str | None:
        return native.problem()

    @classmethod
    def testing_config(cls) -> MooncakeConfig:
        """A master and a segment of this process, which end with it."""
        from lmcache_backend_mooncake.serving import shared_server

        return shared_server().config()

    @property
    def client(self) -> Client:
        if self._client is None:
            raise Closed("mooncake backend is not open")
        return self._client

    # -- life ------------------------------------------------------------------------------------------------

    def open_blocking(self) -> None:
        self.close_blocking()  # of an attempt that failed
        tier, log = self.context.tier, self.context.log
        self._client = Client(
            self.config, type(self).connect, self.context.clock.now,
            lambda line: log.warning("tier %s %s", tier, line),
        )  # fmt: skip
        self._probe()

    def _probe(self) -> None:
        """Send one value there and back."""
        random = self.context.random
        key = Key(random.randbytes(32), random.randbytes(32))
        value, back = random.randbytes(PROBE_NBYTES), bytearray(PROBE_NBYTES)
        began = time.perf_counter()
        stored = self.store_blocking(Store(key, (memoryview(value),)))
        middle = time.perf_counter()
        if stored.status in (StoreStatus.REFUSED, StoreStatus.FAILED):
            if not self.config.segment and stored.status is StoreStatus.REFUSED:
                remedy = "; lend some with the option segment, or start a client that does"
            else:
                remedy = ""
            self.context.log.warning(
                "%s takes no values: %s%s", self.context.tier, stored.reason, remedy
            )
            return
        loaded = self.load_blocking(Load(key, (memoryview(back),)))
        ended = time.perf_counter()
        if loaded.error is not None:
            raise Unavailable(f"{self.config.master}: {loaded.error}")
        self.delete_blocking([key])
        if loaded.status is LoadStatus.FILLED and back != value:
            raise Unavailable(f"the store of {self.config.master} gives back other bytes")
        self.context.log.debug(
            "%s: a value of 1 MiB took %.1f ms there and %.1f ms back",
            self.context.tier, (middle - began) * 1e3, (ended - middle) * 1e3,
        )  # fmt: skip

    def close_blocking(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def interrupt_blocking(self) -> None:
        if self._client is not None and self.config.over == "tcp":
            self._client.cut()

    # -- values ----------------------------------------------------------------------------------------------

    def load_blocking(self, load: Load, /) -> Loaded:
        results: list[Any] = []
        self.client.load([(0, load)], lambda _, result: results.append(result), Flight())
        return results[0]  # type: ignore[no-any-return]

    def store_blocking(self, store: Store, /) -> Stored:
        results: list[Any] = []
        self.client.store_all([(0, store)], lambda _, result: results.append(result), Flight())
        return results[0]  # type: ignore[no-any-return]

    def screen_store(self, store: Store, /) -> Stored | None:
        if not store.nbytes:
            return Stored.refused("empty: the store keeps no such value")
        return super().screen_store(store)

    async def _batch(
        self, operation: str, batch: Sequence[Any], done: Callable[[int, Any], None] | None, /
    ) -> list[Any]:
        answers = self._answers(operation, batch, done)
        each = min(self.config.lanes, len(answers.wanted))
        lanes = [answers.wanted[first::each] for first in range(each)]
        flights = [Flight() for _ in lanes]
        verb = self.client.load if operation == "load" else self.client.store_all
        futures = [
            self._submit(operation, verb, lane, answers.tell, flight)
            for lane, flight in zip(lanes, flights, strict=True)
        ]
        await self._watch(futures, flights)
        answers.drain()  # what was told last
        for future, lane in zip(futures, lanes, strict=True):
            error = future.exception()
            if isinstance(error, BackendError):
                failure = Loaded.failed if operation == "load" else Stored.failed
                for at, _ in lane:
                    if answers.results[at] is None:
                        answers.settle(at, failure(error))
            elif error is not None:
                raise error
        return answers.results

    async def _watch(
        self, futures: Sequence[asyncio.Future[Any]], flights: Sequence[Flight]
    ) -> None:
        """Wait for all calls; end those that nobody waits for, or that take too long."""
        now, limit = self.context.clock.now, float(self.config.timeout)
        pending, left = set(futures), False
        while pending:
            try:
                _, pending = await asyncio.wait(pending, timeout=AGAIN_S if left else limit / 2)
            except asyncio.CancelledError:  # honoured when nothing touches memory any more
                left = True
                for flight in flights:
                    flight.abandoned = True
            since = min((f.since for f in flights if f.since is not None), default=now())
            if pending and (left or now() - since >= limit):
                self._interrupt()
        if left:
            raise asyncio.CancelledError

    # -- keys ------------------------------------------------------------------------------------------------

    def lookup_blocking(self, keys: Sequence[Key], /) -> Sequence[Found | None]:
        sizes = self.client.sizes([self.client.name(key) for key in keys])
        return [None if size is None else Found(size, promise=False) for size in sizes]

    def delete_blocking(self, keys: Sequence[Key], /) -> int:
        return self.client.remove([self.client.name(key) for key in dict.fromkeys(keys)])

    async def hold(self, keys: Sequence[Key], seconds: float, /) -> Sequence[bool]:
        names = [self.client.name(key) for key in keys]
        there = await self.call("hold", self.client.exist, names)
        return [answer == 1 and seconds <= self.config.lease for answer in there]

    async def register(self, region: Region, /) -> bool:
        return await self.call("register", self.client.register, region)

    async def unregister(self, region: Region, /) -> None:
        await self.call("unregister", self.client.unregister, region)

    async def usage(self) -> Usage:
        if not self.config.admin:
            raise self._unsupported("usage")
        return await self.call("usage", admin.usage, self.config)

    async def scan(self, after: str | None = None, /, *, limit: int = 1000) -> ScanPage:
        if not self.config.admin:
            raise self._unsupported("scan")
        return await self.call("scan", self._scan, after, limit)

    def _scan(self, after: str | None, limit: int) -> ScanPage:
        """The master gives all names at once; they are kept while the pages go on."""
        if after is None or not self._listing:
            self._listing = admin.names(self.config)
        rest = self._listing
        if after is not None:
            rest = [name for name in rest if name > after]
        part, prefix = rest[:limit], self.config.prefix
        mine = [name for name in part if name.startswith(prefix)]
        keys: dict[str, Key] = {}
        for name in mine:
            try:
                keys[name] = Key.parse(name.removeprefix(prefix))
            except ValueError:
                continue
        sizes = self.client.sizes(list(keys))
        values = [
            (key, Found(size, promise=False))
            for key, size in zip(keys.values(), sizes, strict=True)
            if size is not None
        ]
        foreign = [name for name in mine if name not in keys]
        then = part[-1] if len(rest) > limit else None
        self._listing = rest[limit:] if then is not None else []
        return ScanPage(values, then, foreign)
