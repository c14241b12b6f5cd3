"""The control process: one loop, one storage manager, sockets in front of it.

The loop does control only. Bytes of a hot hit never pass it, HTTP and exporters are other processes that speak
the protocol, and turns that take longer than a millisecond are counted (``describe`` shows them).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lmcache_core import __version__
from lmcache_core.config import Effective, Share
from lmcache_core.identity import probe_digest
from lmcache_core.memory.arena import Access
from lmcache_core.memory.leases import Held
from lmcache_core.observers import Emitter, Metrics
from lmcache_core.spi import ConfigError, Key, LMCacheError, Secret
from lmcache_core.storage.build import Builder, default_context, fidelity
from lmcache_core.storage.feed import Feed
from lmcache_core.storage.manager import StorageManager
from lmcache_core.storage.results import Shutdown
from lmcache_core.wire import records, replies, tls
from lmcache_server import service, tiers
from lmcache_server.admin import ADMIN_VERBS
from lmcache_server.connection import Connection
from lmcache_server.describing import document
from lmcache_server.engines import Engines
from lmcache_server.listening import Listener, claim, disclaim, listen
from lmcache_server.many import MANY_VERBS
from lmcache_server.pins import Pins
from lmcache_server.session import Session, Sessions
from lmcache_server.turns import Turns, steady
from lmcache_server.verbs import VALUE_VERBS, Answer

VERBS = {**VALUE_VERBS, **ADMIN_VERBS, **MANY_VERBS}
_MOST_PEERS = 1000
_STOCK_AGE_S = 0.05
_AHEAD = 64 << 20  # a slab


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a daemon is reached, and how it ends.

    Attributes:
        path: its unix socket.
        host, port: TCP; port 0 listens on none.
        token: for TCP; without one TCP serves the hello only.
        certificate, key: files (PEM) for TLS on TCP; without them it is plain.
        sockets: listening ones that a service manager has passed, in place of those above.
        access: who may write into memory besides the daemon.
        overcommit: take more memory than the machine has.
        grace: seconds after its last client at which a private daemon ends; None for a public one.
        changes: what came and went that is kept for followers.
        drain: seconds a stop waits for clients, and as many for unwritten values.
    """

    path: str
    host: str = "localhost"
    port: int = 0
    token: Secret = Secret("")
    certificate: str = ""
    key: str = ""
    sockets: Sequence[socket.socket] = ()
    access: Access = Access.OWNER
    overcommit: bool = False
    grace: float | None = None
    drain: float = 5.0
    changes: int = 1 << 14

    @property
    def mode(self) -> str:
        """What ``--arena-mode`` calls the access."""
        return "sealed" if self.access is Access.OWNER else self.access.value


class Daemon:
    """See the module.

    Args:
        reload: reads the configuration again.
        ready: called when it serves.
    """

    def __init__(
        self,
        effective: Effective,
        options: Options,
        *,
        reload: Callable[[], Effective] | None = None,
        ready: Callable[[Daemon], None] = lambda daemon: None,
    ) -> None:
        self.effective = effective
        self.options = options
        self.boot = secrets.token_bytes(16)
        self.feed = Feed(options.changes)
        self.connections: set[Connection] = set()
        self.turns = Turns()
        self.tls: ssl.SSLContext | None = None
        if options.certificate:
            self.tls = tls.serve(options.certificate, options.key)
        self.now = time.monotonic
        self.log = logging.getLogger("lmcache.server")
        self._reload = reload
        self._ready = ready
        self._refused: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.tiering = asyncio.Lock()
        self._listeners: list[Listener] = []
        self.quotas: dict[str, int] = {}
        self._stock: tuple[float, bool] = (0.0, False)
        self.begun = time.time()

    def run(self) -> Shutdown:
        """Open, serve until told to stop, and end in time.

        Raises:
            ConfigError, PluginError: it cannot work as configured, or the socket is another daemon's.
        """
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(self.turns)) as runner:
            return runner.run(self._run())

    async def _run(self) -> Shutdown:
        config, metrics, options = self.effective.config, Metrics(), self.options
        registry = self.effective.registry
        observers = [
            (choice.name, registry.load("observers", choice.name)(choice.options))
            for choice in config.observers
        ]
        events = Emitter(observers, metrics, log=self.log)
        lock = claim(options.path)
        try:
            self.builder = Builder(
                config, registry, metrics, lambda name: default_context(name, events)
            )
            self.builder.feed = self.feed
            self.builder.access = options.access
            self.builder.overcommit = options.overcommit
            self.attach(await self.builder.build())
            self._warm_up()
            for each in listen(options.path, options.host, options.port, options.sockets):
                self._listeners.append(Listener(self, each))
        except BaseException:
            disclaim(options.path, lock)
            raise
        for number, call in (
            (signal.SIGTERM, self.stop), (signal.SIGINT, self.stop), (signal.SIGHUP, self.reload),
        ):  # fmt: skip
            self.loop.add_signal_handler(number, call)
        if options.grace is not None:
            self.work(self._end_when_idle(options.grace))
        self.work(service.beat())
        self._ready(self)
        self.turns.begin()
        await self._stopping.wait()
        shutdown = await self._end()
        events.close()
        disclaim(options.path, lock)
        return shutdown

    def attach(self, manager: StorageManager) -> None:
        """Serve this manager, on the loop that runs now."""
        self.loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self.manager = manager
        self.sessions = Sessions(manager, self._session_over)
        self.engines = Engines(manager, self.log.info)
        self.pins = Pins(manager, self.now)

    def _warm_up(self) -> None:
        """Do once what the first client would wait for: load what a hello needs, begin to touch memory."""
        self.welcome(0)
        manager = self.manager
        for held in manager.reserve([(Key(bytes(32), bytes(32)), 1)], self):
            if isinstance(held, Held):
                manager.abort(held)
        steady()

    def stop(self) -> None:
        """Begin to end (SIGTERM)."""
        self._stopping.set()

    def handle(self, link: Connection, session: Session, record: records.Record) -> Answer:
        """Answer one request of an open connection.

        Raises:
            ConfigError, BackendError: said to the client. ValueError: breaks the protocol.
        """
        verb = VERBS.get(type(record))
        if verb is None:
            raise ValueError(f"{type(record).__name__.lower()} in the middle of a connection")
        return verb(self, link, session, record)

    def work(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine to its end; what it raises is logged."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._worked)

    def _worked(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.log.error("a request failed: %s", error, exc_info=error)

    # -- answers -------------------------------------------------------------------------------------------

    def welcome(self, id: int) -> replies.Welcome:
        config, registry = self.effective.config, self.effective.registry
        return replies.Welcome(
            id,
            records.VERSION,
            probe_digest(),
            self.boot,
            os.getpid(),
            os.geteuid(),
            list(records.CAPABILITIES),
            path=self.options.path,
            writable=self.options.access is Access.SHARED,
            chunk_size=config.engine.chunk_size,
            fidelity=fidelity(config, registry),
            release=__version__,
        )

    def segments(self, first: int) -> tuple[list[tuple[int, int, int]], list[int]]:
        """Segments from a number on, and their descriptors."""
        found = [
            segment
            for segment in self.manager.pool.arena.segments[first:]
            if segment.descriptor >= 0
        ]
        return [(s.number, s.nbytes, s.backed) for s in found], [s.descriptor for s in found]

    def describe(self) -> bytes:
        """The document behind ``lmcache describe`` (JSON)."""
        return document(self)

    def crowded(self) -> bool:
        """Whether leases hold their whole share of memory; counted now and then, as that costs."""
        now = self.now()
        if now > self._stock[0]:
            pool = self.manager.pool
            share = pool.capacity * self.effective.config.manager.offers
            crowded = pool.lent * max(pool.slabs.sizes(), default=0) > share
            crowded = crowded and pool.accounting().leased > share
            after = self.now()
            self._stock = (after + max(_STOCK_AGE_S, 20 * (after - now)), crowded)
        return self._stock[1]

    def touching(self, nbytes: int) -> bool:
        """Whether so many bytes are more than what has been touched so far, and more is being touched."""
        pool = self.manager.pool
        ahead = pool.arena.populated - (pool.capacity - pool.free)
        return ahead < nbytes + _AHEAD and any(thread.is_alive() for thread in pool.arena.touching)

    def set_quota(self, tenant: str, nbytes: int | None) -> None:
        """Limit a tenant's share of memory from now on."""
        if nbytes is None:
            self.quotas.pop(tenant, None)
        else:
            self.quotas[tenant] = nbytes
        self._limit(self.quotas)

    def _limit(self, quotas: Mapping[str, int]) -> None:
        named = {name: nbytes for name, nbytes in quotas.items() if name != "default"}
        self.manager.pool.quotas = named
        self.manager.pool.default_quota = quotas.get("default")

    def refuse(self, peer: str, why: str) -> None:
        """Log what a peer did wrong, once per peer."""
        if peer not in self._refused and len(self._refused) < _MOST_PEERS:
            self._refused.add(peer)
            self.log.warning("refused %s: %s", peer, why)

    # -- sessions ------------------------------------------------------------------------------------------

    def watch(self, session: Session) -> None:
        """Notice the end of a session's process."""
        assert session.process is not None
        self.loop.add_reader(session.process.fileno(), self._gone, session)

    def _gone(self, session: Session) -> None:
        self.sessions.gone(session)

    def _session_over(self, session: Session) -> None:
        self.engines.ended(session)
        if session.process is not None:
            self.loop.remove_reader(session.process.fileno())
            session.process.discard()

    # -- life ----------------------------------------------------------------------------------------------

    def reload(self) -> None:
        """``take_over`` for SIGHUP, which nobody can answer."""

        async def work() -> None:
            service.tell(service.reloading())
            try:
                await self.take_over()
            except LMCacheError as error:
                self.log.error("configuration not reloaded as it is written: %s", error)
            service.tell(service.READY)

        self.work(work())

    async def take_over(self) -> None:
        """Read the configuration again and do what may change live.

        That is the log level, tenants' quotas, the certificate; lower tiers, their limits and their options.

        Raises:
            ConfigError: it is wrong, or there is none to read: nothing has changed. Or tiers cannot follow: the rest has.
        """
        if self._reload is None:
            raise ConfigError("this daemon was started without a configuration to read again")
        fresh = self._reload()
        if self.tls is not None:
            tls.load(self.tls, self.options.certificate, self.options.key)
        new = fresh.config
        logging.getLogger("lmcache").setLevel(new.log_level.upper())
        size = self.manager.pool.capacity
        quotas = {
            name: int(size * each.quota) if isinstance(each.quota, Share) else int(each.quota)
            for name, each in new.tenants.items()
            if each.quota is not None
        }
        self.quotas = quotas
        self._limit(quotas)
        self.effective = fresh
        try:
            await tiers.follow(self, new)
        except LMCacheError as error:
            raise ConfigError(f"all but the tiers is as it is written now: {error}") from error
        self.log.info("configuration reloaded")

    async def _end_when_idle(self, grace: float) -> None:
        alone = self.now()
        while True:
            await asyncio.sleep(min(1.0, grace / 4))
            if self.sessions.connected:
                alone = self.now()
            elif self.now() - alone >= grace:
                self.log.info("no client for %g s: ending", grace)
                self.stop()
                return

    async def _end(self) -> Shutdown:
        """Drain, flush, close, in time."""
        service.tell(service.STOPPING)
        for listener in self._listeners:
            listener.close()
        if not any(sock.family == socket.AF_UNIX for sock in self.options.sockets):
            with suppress(OSError):
                os.unlink(self.options.path)
        self.manager.freeze()
        self.pins.unpin([])
        for link in list(self.connections):
            if link.session is not None:
                link.reply(replies.Boot(self.boot, "stopping"))
                link.reply(replies.Revoke([]))
        until = self.now() + self.options.drain
        while self.now() < until and any(not s.empty for s in self.sessions.by_token.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # releases come from connections one by one
        self.manager.unfreeze()
        shutdown = await self.manager.aclose(deadline=self.now() + self.options.drain)
        for link in list(self.connections):
            link.close()
        for task in list(self._tasks):
            task.cancel()
        return shutdown
