"""Histories of the whole: engines, their clients, the daemon's protocol and sessions, the manager, tiers with faults.

As ``lmcache_core.testing.histories``, and some of the clients are simulated processes that reach the manager
through a daemon, over simulated sockets that are slow, tear, break, fall silent and flip bits; processes are
killed at any moment, the daemon too, and the next one has another boot id, empty memory and what the tiers kept.
Besides what that module checks: a request has exactly one reply, by its deadline; no lease and no reservation is
without an owner that lives; a chunk is visible with all its shards or not at all; what a tier had acknowledged is
there after a restart.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any

from lmcache_server.connection import Connection
from lmcache_server.engines import Joint
from lmcache_server.session import Session

from lmcache_core import frame
from lmcache_core.memory.arena import Access
from lmcache_core.spi import Lease
from lmcache_core.testing.histories import History, Outcome
from lmcache_core.testing.worlds import SPACE, verify_lease
from lmcache_core.wire import records
from tests.simulation import lives, processes
from tests.simulation.daemons import SimDaemon, simulated
from tests.simulation.disks import DiskPlace
from tests.simulation.network import Faults, Network
from tests.simulation.sockets import SimSocket
from tests.simulation.threads import SimThread

LATE_S = 5e-3
PATIENCE_S = 60.0
"""Within which a request that names no time is answered; its values may be on their way for so long."""


class Counted(Connection):
    """A connection of the daemon that keeps account of requests and replies."""

    def __init__(self, history: DaemonHistory, sock: SimSocket, *, local: bool) -> None:
        self.history = history
        self.asked: dict[int, int] = {}
        self.due: dict[int, float] = {}
        super().__init__(history.daemon, sock, local=local)

    def _handle(self, record: records.Record) -> None:
        self.history.step()
        if isinstance(record, records.Message):
            assert record.id not in self.asked or not self.local, f"a second request {record.id}"
            self.asked[record.id] = 0
            seconds = getattr(record, "seconds", PATIENCE_S)
            if isinstance(record, records.Prefetch):
                seconds = PATIENCE_S  # what it names is for the work, not for the answer
            self.due[record.id] = self.daemon.now() + seconds
        super()._handle(record)

    def reply(self, record: Any, **how: Any) -> None:
        self.history.step()
        if isinstance(record, records.Message):
            assert record.id in self.asked, f"a reply that nobody asked for: {record}"
            self.asked[record.id] += 1
            assert self.asked[record.id] == 1, f"{self.asked[record.id]} replies to {record.id}"
            late = self.daemon.now() - self.due.pop(record.id, self.daemon.now())
            assert late <= LATE_S, f"a reply {late:.3f} s after its deadline: {record}"
        super().reply(record, **how)

    def silent(self) -> list[int]:
        """Requests whose time is over, without a reply."""
        now = self.daemon.now()
        late = [id for id, due in self.due.items() if now > due + LATE_S]
        return [] if self.closed else late


class DaemonHistory(History):
    """One world with a daemon in it; see the module."""

    def __init__(self, outcome: Outcome, operations: int, kinds: Sequence[str]) -> None:
        super().__init__(outcome, operations, kinds)
        source = self.source
        self.network = Network(self.loop, random.Random(source.getrandbits(64)))
        self.network.faults = Faults(
            slow=source.choice((0.0, 0.1)), slow_s=source.choice((0.05, 2.0)),
            tear=source.choice((0.1, 0.7)), cut=source.choice((0.0, 0.01, 0.04)),
            hush=source.choice((0.0, 0.005)), flip=source.choice((0.0, 0.02)),
        )  # fmt: skip
        self.access = source.choice((Access.OWNER, Access.SHARED))
        self.threads: list[SimThread] = []
        self.pids = 1
        self.links: list[Counted] = []
        self.mortal = source.random() < 0.7
        self.serving = False
        self.life = self.steps = 0
        self.around = copy_context()
        self.main = asyncio.current_task()
        self.outside: list[asyncio.Task[None]] = []
        self.frozen: list[asyncio.Task[Any]] = []

    # -- what must hold ------------------------------------------------------------------------------------

    def verify(self, lease: Lease) -> None:
        if lease.key.space == SPACE:
            verify_lease(lease)
            return
        header = frame.open_header(lease.view, lease.key)
        frame.verify(header, lease.view[header.nbytes : header.nbytes + header.stored_nbytes])

    def check(self) -> None:
        if self.serving:
            super().check()

    def check_books(self) -> None:
        super().check_books()
        known = self.daemon.sessions.by_token
        for owner in self.manager.pool.owners:
            if isinstance(owner, Session):
                # What a load under way leases is given back when it ends.
                loads = any(link.session is owner and link._waiting for link in self.links)
                lives = known.get(owner.token) is owner
                assert lives or loads, f"{owner} holds memory and is over"
            elif isinstance(owner, Joint):
                lives = owner.engine.joints.get(owner.key) is owner
                assert lives or owner.writers, f"nobody fills {owner.key!r}, and it is held"
        silent = {link.peer: ids for link in self.links if (ids := link.silent())}
        assert not silent, f"requests without a reply: {silent}"
        assert not self.daemon.broken, self.daemon.broken

    async def quiet(self) -> None:
        self.network.faults = Faults()
        try:
            await super().quiet()
        except AssertionError as error:
            owners = [f"{owner}" for owner in self.manager.pool.owners]
            raise AssertionError(f"{error}; owners: {owners}") from error
        left = [session for session in self.daemon.sessions.by_token.values() if not session.empty]
        assert not left, f"sessions still hold something: {left}"
        assert not self.daemon.connections, f"connections are left: {self.daemon.connections}"

    # -- clients -------------------------------------------------------------------------------------------

    async def begin(self, names: Sequence[str]) -> None:
        """A new process of the daemon on what the tiers kept; it may be killed before it serves."""
        self.names, self.life = names, self.life + 1
        self.doom = self.loop.create_future()
        self.spare.clear()
        self.resizing.update(names)
        opening = self.inside(self.open(names))
        self.arm()
        await asyncio.wait([opening, self.doom], return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            opening.result()

    async def open(self, names: Sequence[str]) -> None:
        self.manager = self.make_manager(names, self.access)
        await self.manager.open()
        self.daemon = SimDaemon(self.network, self.access)
        self.daemon.attach(self.manager)
        around = lives.begin(self.life)
        self.network.accept = lambda sock: around.run(self._accept, sock)
        self.serving = True

    def inside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """What ends with the daemon's process."""
        task: asyncio.Task[None] = lives.begin(self.life).run(self.loop.create_task, work)
        return task

    def _accept(self, sock: SimSocket) -> None:
        self.links.append(Counted(self, sock, local=sock.family == socket.AF_UNIX))

    async def work(self) -> None:
        source = self.source
        places = [
            source.choice(("unix", "unix", "tcp")),
            source.choice(("unix", "tcp", "embedded")),
        ]
        outside = [self.process(processes.work, f"{at}", place)
                   for at, place in enumerate(places) if place != "embedded"]  # fmt: skip
        if source.random() < 0.3:
            outside.append(self.cutter())
        if self.access is Access.SHARED and source.random() < 0.5:
            orders = [processes.Orders(), processes.Orders()]
            outside.append(self.process(processes.schedule, orders))
            outside += [self.process(processes.rank, at, each) for at, each in enumerate(orders)]
        self.outside = [self.loop.create_task(each) for each in outside]
        while True:
            inside = [self.inside(self.client("local client")), self.inside(self.operator())]
            if "embedded" in places:
                inside.append(self.inside(self.process(processes.work, "1", "embedded")))
            await self.until_killed([*inside, *self.outside])
            if self.serving:
                self.mortal = False
                return
            while not self.serving:
                await asyncio.sleep(source.choice((0.0, 0.1, 3.0)) * source.random())
                await self.begin(self.names)

    async def until_killed(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        while self.serving and (left := [each for each in tasks if not each.done()]):
            await asyncio.wait([*left, self.doom], return_when=asyncio.FIRST_COMPLETED)
            for each in left:
                if each.done():
                    each.result()

    # -- the end of the daemon -----------------------------------------------------------------------------

    def arm(self) -> None:
        """Draw when it is killed: at some time, at some request or reply, at some system call of a tier."""
        source, kill = self.source, partial(self.kill, self.life)
        self.steps = 0
        if not self.mortal:
            return
        self.loop.call_later(source.uniform(0, 8), kill)
        self.steps = source.choice((0, source.randrange(1, 150)))
        for place in self.places.values():
            if isinstance(place, DiskPlace) and source.random() < 0.3:
                place.crash_in = source.randrange(1, 200)
                place.crash = partial(self.doomed, kill)

    def step(self) -> None:
        """A request has come, or a reply goes."""
        self.steps -= 1
        if not self.steps:
            self.doomed(partial(self.kill, self.life))

    def doomed(self, kill: Callable[[], None]) -> None:
        """Said from within the process that is to be killed next."""
        self.loop.call_soon(kill, context=self.around)

    def kill(self, life: int) -> None:
        """Kill the daemon, if it is still in this life, perhaps with its power."""
        if life != self.life or not self.mortal or self.doom.done():
            return
        self.network.hit["daemon killed"] += 1
        self.serving, self.steps = False, 0
        self.network.end_daemon()
        self._freeze(life)
        for thread in self.threads:
            if thread.life == life and not thread.over:
                self.bury(thread)
        self._freeze(life)  # and what its threads began in their ends
        self.links.clear()
        power = self.source.random() < 0.4
        for place in self.places.values():
            if isinstance(place, DiskPlace):
                place.died(power=power)
        self.doom.set_result(None)

    def _freeze(self, life: int) -> None:
        mine = {*self.outside, self.main}
        frozen = [each for each in asyncio.all_tasks(self.loop) if each not in mine]
        self.frozen += frozen
        lives.freeze(self.loop, life)
        lives.forget(frozen)

    # -- clients -------------------------------------------------------------------------------------------

    async def cutter(self) -> None:
        """Connections also break while nothing is said."""
        while self.left > 0:
            await asyncio.sleep(self.source.uniform(0, 2))
            clients = [each for each in self.network.sockets.values() if each.owner > 1]
            if clients:
                self.network._cut(self.source.choice(clients))

    async def process(self, body: Any, *args: Any) -> None:
        """A process, and who comes after it when it is killed."""
        embedded = "embedded" in args
        while self.left > 0:
            self.pids += 1
            thread = SimThread(self.loop, body, self, *args)
            thread.pid, thread.kin = self.pids, [thread]
            self.threads.append(thread)
            thread.start()
            lifetime = None
            if not embedded and body is not processes.schedule and self.source.random() < 0.3:
                lifetime = self.source.uniform(0, 10)
            await asyncio.wait([thread.ended], timeout=lifetime)
            if thread.over and thread.error is not None:
                raise thread.error
            if not thread.over:
                self.network.hit["killed"] += 1
            self.bury(thread)
            await asyncio.sleep(self.source.uniform(0, 0.5))

    def bury(self, thread: SimThread) -> None:
        """End a process; what it held is the daemon's business."""
        self.network.die(thread.pid)
        for each in thread.kin:
            each.kill()

    async def run(self) -> None:
        with simulated(self.loop, self.network, random.Random(self.source.getrandbits(64))):
            try:
                await super().run()
            finally:
                for thread in self.threads:
                    self.bury(thread)
                lives.bury(self.loop, self.frozen)
                self.outcome.faults.update(self.network.hit)

    async def close(self, *, hasty: bool = False) -> None:
        self.network.accept = None
        for link in list(self.daemon.connections):
            link.close()
        await super().close(hasty=hasty)
