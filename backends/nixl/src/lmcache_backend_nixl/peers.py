"""Parts in the memory of a target: UCX, LIBFABRIC.

Both sides only ever read: a load reads the target's memory, a store is read by the target. So no clock and no lost connection
can make anybody write into memory that has been given to somebody else. A reader learns afterwards whether what it read was
held for it all the time; a value becomes visible only when its writer says, after the target has read it, that the memory was still
its own.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from functools import partial
from socket import socket
from typing import Any

from lmcache_backend_nixl.agent import Agent, Piece
from lmcache_backend_nixl.config import NixlConfig, RailConfig
from lmcache_backend_nixl.directory import Directory, Record
from lmcache_backend_nixl.driver import Call, Operation, Step, Together
from lmcache_backend_nixl.link import Link
from lmcache_backend_nixl.memory import Staging, pieces
from lmcache_backend_nixl.rail import Rail, Transfer, all_stored, wanted
from lmcache_core import ops
from lmcache_core.spi import (
    MISSED,
    PRESENT,
    STORED,
    BackendError,
    Context,
    Executor,
    Load,
    Loaded,
    MemoryKind,
    Region,
    Stored,
    Unavailable,
    section,
)

AGAIN_S = 0.2
"""How long nobody tries a target anew that could not be reached."""


class Answer:
    """An answer of the target as a step."""

    __slots__ = ("_end", "_link", "_message", "_number", "_timeout", "result")

    def __init__(self, link: Link, timeout: float, /, *message: Any) -> None:
        self._link, self._message, self._timeout = link, message, timeout
        self._end = 0.0
        self._number = 0
        self.result: Any = None

    @property
    def begun(self) -> bool:
        """Whether the target may hear of it."""
        return self._number > 0

    def begin(self, executor: Executor, /) -> None:
        self._link.check()
        self._end = time.monotonic() + self._timeout
        self._number = self._link.queue(*self._message)

    def ended(self) -> bool:
        link = self._link  # answers come with ``PeerRail.flush``
        if self._number not in link.answers:
            if time.monotonic() > max(self._end, link.heard + self._timeout):
                link.close("it does not answer")
            link.check()
            return False
        self.result = link.answers.pop(self._number)
        return True


class Until:
    """A function that gives None as long as one has to wait, as a step."""

    __slots__ = ("_function", "result")

    def __init__(self, function: Callable[[], Any], /) -> None:
        self._function = function
        self.result: Any = None

    def begin(self, executor: Executor, /) -> None:
        pass

    def ended(self) -> bool:
        self.result = self._function()
        return self.result is not None


class PeerRail(Rail):
    """The memory of one target."""

    register = True

    def __init__(self, rail: RailConfig, config: NixlConfig, context: Context, /) -> None:
        self._rail, self._config = rail, config
        self._name = f"tier-{context.pid:x}"
        self._agent: Agent | None = None
        self._staging = Staging(config.staging)
        at, nbytes = self._staging.at, self._staging.nbytes
        self._regions = [Region(MemoryKind.HOST, 0, at, nbytes)]
        self._link: Link | None = None
        self._described = 0
        self._asking: Link | None = None
        self._mutex, self._asking_mutex = threading.Lock(), threading.Lock()
        self._failed: tuple[float, BackendError] | None = None
        self._directory = Directory(rail.address, config.timeout) if rail.named else None
        self._record: Record | None = None
        self._lost = True
        self._flying = self._offered = 0
        self._hurried = 0.0

    # -- life ----------------------------------------------------------------------------------------------

    def open(self) -> None:
        self._connect()

    def close(self) -> None:
        for link in (self._link, self._asking):
            if link is not None:
                link.close("closed")
        if self._agent is not None:
            agent, self._agent = self._agent, None
            agent.close()

    def _dial(self, introduction: tuple[str, str, bytes]) -> Link:
        token, timeout = self._config.token.reveal(), self._config.timeout
        if self._directory is None:
            return Link(self._rail.host, token, timeout, introduction)
        record = self._find(self._directory)
        self._lost = True  # unless it is there
        link = Link(record.host, token, timeout, introduction)
        if link.peer != record.agent:
            link.close("another target")
            raise Unavailable(f"target {link.where} is not the one that etcd has a record of")
        self._lost = False
        link.description = record.about
        return link

    def _find(self, directory: Directory) -> Record:
        """What etcd said last of the target; it is asked when that leads nowhere, and does without an answer."""
        if self._record is None or self._lost:
            try:
                self._record = directory.find()
            except Unavailable:
                if self._record is None:
                    raise
        return self._record

    def _connect(self) -> None:
        """Make agent and connection where they are missing."""
        with self._mutex:
            if self._link is not None and not self._link.problem and self._agent is not None:
                return
            if self._failed is not None and time.monotonic() < self._failed[0] + AGAIN_S:
                raise self._failed[1].with_traceback(None)
            try:
                self._connect_anew()
            except BackendError as error:
                self._failed = (time.monotonic(), error)
                raise
            self._failed = None

    def _connect_anew(self) -> None:
        if self._agent is None:
            # Not from the context: two agents of one name would take each other's place at the target.
            name = f"{self._name}-{secrets.token_hex(8)}"
            self._agent = Agent(name, self._rail.backend, self._rail.parameters)
            for region in self._regions:
                self._agent.add(region)
        agent, old = self._agent, self._link
        if old is not None:
            old.close("given up")
            agent.part(old.peer)
        self._described = len(self._regions)
        link = self._dial((agent.name, self._rail.backend, agent.describe()))
        try:
            agent.meet(link.description)
        except Unavailable:
            link.close("not understood")
            raise
        self._link = link

    def add(self, region: Region, /) -> bool:
        with self._mutex:
            if self._agent is not None:
                self._agent.add(region)
            self._regions.append(region)
        return True

    def remove(self, region: Region, /) -> None:
        with self._mutex:
            self._regions.remove(region)
            if self._agent is not None:
                self._agent.remove(region)

    @property
    def socket(self) -> socket | None:
        link = self._link
        if link is None or link.problem or self._agent is None:
            return None  # nobody reads it
        return link.socket

    def hurry(self) -> None:
        if not self._hurried:
            self._hurried = time.monotonic()

    def flush(self) -> bool:
        """Also: end an agent whose transfers go on although nobody wants them any more."""
        if not self._flying:
            self._hurried = 0.0
        elif self._hurried and time.monotonic() > self._hurried + self._config.timeout:
            agent, self._agent, self._hurried = self._agent, None, 0.0
            if agent is not None:
                agent.close()
        link, agent = self._link, self._agent
        if link is None or agent is None:
            return False
        if self._offered:
            with suppress(Unavailable):
                agent.progress()
        sent = link.flush()
        return link.pump() or sent

    # -- short questions, on any thread --------------------------------------------------------------------

    def _ask(self, *message: Any) -> list[Any]:
        with self._asking_mutex:
            old = self._asking
            if old is not None and not old.problem:
                with suppress(Unavailable):  # the target may have been started anew
                    return old.ask(*message)
                if "no answer" in old.problem:
                    old.check()
            if self._failed is not None and time.monotonic() < self._failed[0] + AGAIN_S:
                raise self._failed[1].with_traceback(None)
            try:
                self._asking = self._dial(("", "", b""))
                return self._asking.ask(*message)
            except BackendError as error:
                self._failed = (time.monotonic(), error)
                raise

    def lengths(self, names: Sequence[str], /) -> list[int | None]:
        return list(self._ask("look", names)[0])

    def delete(self, names: Sequence[str], /) -> list[bool]:
        return list(self._ask("delete", names)[0])

    # -- parts ---------------------------------------------------------------------------------------------

    def _linked(self) -> Generator[Step, Any, tuple[Link, Agent]]:
        """A connection that is up, with the target knowing all registered memory."""
        if self._link is not None:
            self._link.pump()
        if self._link is None or self._link.problem or self._agent is None:
            yield Call(self._connect)
        link, agent = self._link, self._agent
        if link is None or agent is None:
            raise Unavailable("the connection was ended at once")
        if self._described != len(self._regions):
            self._described = len(self._regions)
            link.queue("memory", agent.describe())
        return link, agent

    def _fly(self, agent: Agent, link: Link, local: Sequence[Piece], at: int) -> Operation:
        places = []
        for _, nbytes in local:
            places.append((at, nbytes, 0))
            at += nbytes
        self._flying += 1
        try:
            yield Transfer(agent, "READ", local, "DRAM", places, link.peer)
        finally:
            self._flying -= 1

    def _windows(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Sections of a value that goes through the staging memory."""
        each = max(Staging.PAGE, self._staging.nbytes // 4)
        return ((at, min(each, nbytes - at)) for at in range(0, nbytes, each))

    def load(self, name: str, load: Load, /) -> Operation:
        link, agent = yield from self._linked()
        timeout = self._config.timeout
        (nbytes, start, lease) = yield Answer(link, timeout, "load", name)
        if nbytes is None:
            return MISSED
        free = Answer(link, timeout, "free", lease)
        try:
            length = wanted(load, nbytes)
            local = pieces(load.into, length)
            if all(agent.covers(piece) for piece in local):
                if local:
                    yield from self._fly(agent, link, local, start + load.offset)
            else:
                for at, part in self._windows(length):
                    room = yield Until(partial(self._staging.take, part))
                    try:
                        into = [(self._staging.at + room[0], part)]
                        yield from self._fly(agent, link, into, start + load.offset + at)
                        staged = self._staging.view[room[0] : room[0] + part]
                        for view in section(load.into, at, part):
                            ops.copy(view, staged[: view.nbytes])
                            staged = staged[view.nbytes :]
                    finally:
                        self._staging.give(room)
            (kept,) = yield free
        finally:
            if not free.begun:
                link.queue("free", lease)
        if not kept:
            raise Unavailable(f"target {link.where} did not keep what was loaded")
        return Loaded.filled(length)

    def store(
        self, name: str, views: Sequence[memoryview], /, *, first: bool, others: Together | None
    ) -> Operation:
        link, agent = yield from self._linked()
        timeout, nbytes = self._config.timeout, sum(view.nbytes for view in views)
        local = pieces(views, nbytes)
        covered = all(agent.covers(piece) for piece in local)
        offered = local if covered else []
        said, ticket = yield from self._offer(link, "store", name, nbytes, first, offered)
        if said == "present":
            return PRESENT
        if said != "ticket":
            return Stored.refused(f"target {link.where}: {ticket}")
        commit = Answer(link, timeout, "commit", ticket)
        try:
            if not covered:
                for at, part in self._windows(nbytes):
                    room = yield Until(partial(self._staging.take, part))
                    try:
                        staged = self._staging.view[room[0] : room[0] + part]
                        for view in section(views, at, part):
                            ops.copy(staged[: view.nbytes], view)
                            staged = staged[view.nbytes :]
                        local = [(self._staging.at + room[0], part)]
                        (problem,) = yield from self._offer(link, "pull", ticket, at, local)
                        if problem:
                            raise Unavailable(f"target {link.where}: {problem}")
                    finally:
                        self._staging.give(room)
            if others is not None and (problem := all_stored((yield others))) is not None:
                return problem
            (kept,) = yield commit
        finally:
            if not commit.begun:
                link.queue("drop", ticket)
        return STORED if kept else PRESENT

    def _offer(self, link: Link, *message: Any) -> Operation:
        """Let the target read. What it reads after we gave up is never committed."""
        self._offered += 1
        try:
            return (yield Answer(link, self._config.timeout, *message))
        finally:
            self._offered -= 1
