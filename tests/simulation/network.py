"""Simulated stream sockets: delays, torn pieces, cuts, silence and damage, with descriptors riding along.

A connection is two pipes. What is sent into one arrives later, in order, in pieces as the seed likes. ``Faults``
says how often a connection breaks, how often it falls silent, and whether bits flip (over TCP only: a unix socket
has no wire). A fault counts as effective when it met bytes under way or a request that waited.
"""

from __future__ import annotations

import errno
import os
import random
import select
import socket as real
from collections import Counter
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from lmcache_core.testing.simulation import SimLoop
from tests.simulation.sockets import ROOM, SimSocket
from tests.simulation.threads import running


@dataclass
class Faults:
    """Probabilities, per send.

    Attributes:
        slow: of a pause up to ``slow_s``; long ones make replies late.
        tear: of arriving in two pieces.
        cut: of the connection breaking, with what is under way lost in part.
        hush: of nothing arriving any more, in one direction, for good, over TCP.
        flip: of one flipped bit, over TCP.
    """

    slow: float = 0.0
    slow_s: float = 0.0
    tear: float = 0.0
    cut: float = 0.0
    hush: float = 0.0
    flip: float = 0.0


class Network:
    """All sockets of one simulation, and the loop's view of them.

    Args:
        accept: takes the daemon's end of a new connection; replaced when a daemon starts or ends (None).

    Attributes:
        hit: effective faults by kind.
    """

    def __init__(self, loop: SimLoop, source: random.Random) -> None:
        self.loop = loop
        self.random = source
        self.faults = Faults()
        self.hit: Counter[str] = Counter()
        self.accept: Callable[[SimSocket], None] | None = None
        self.waiting: dict[int, list[Any]] = {}
        self.sockets: dict[int, SimSocket] = {}
        self.dead: set[int] = set()
        self.pidfds: dict[int, int] = {}
        self._readers: dict[int, tuple[Callable[..., None], tuple[Any, ...], Context]] = {}
        self._writers: dict[int, tuple[Callable[..., None], tuple[Any, ...], Context]] = {}
        self._context = copy_context()  # what is under way outlives who has sent it
        self._next = 1 << 20
        loop.add_reader = self._add(self._readers)  # type: ignore[method-assign]
        loop.add_writer = self._add(self._writers)  # type: ignore[method-assign]
        loop.remove_reader = lambda fd: self._readers.pop(fd, None) is not None  # type: ignore[method-assign,misc]
        loop.remove_writer = lambda fd: self._writers.pop(fd, None) is not None  # type: ignore[method-assign,misc]

    def number(self, sock: SimSocket) -> int:
        self._next += 1
        self.sockets[self._next] = sock
        return self._next

    def forget(self, sock: SimSocket) -> None:
        self.sockets.pop(sock.number, None)

    def pidfd(self, pid: int) -> int:
        """A new descriptor that is readable once the process is gone."""
        self._next += 1
        self.pidfds[self._next] = pid
        return self._next

    def gone(self, pidfd: int) -> bool:
        return self.pidfds.get(pidfd) in self.dead

    def die(self, pid: int) -> None:
        """The process is gone: its sockets close, its pidfd says so."""
        for sock in [each for each in self.sockets.values() if each.owner == pid]:
            sock.close()
        self.dead.add(pid)
        for pidfd in [fd for fd, each in self.pidfds.items() if each == pid]:
            self._look(pidfd)

    def end_daemon(self) -> None:
        """The daemon is gone: nobody accepts, its sockets close."""
        self.accept = None
        self._readers.clear()
        self._writers.clear()
        self.die(1)
        self.dead.discard(1)  # the next one is

    def _add(self, table: dict[int, Any]) -> Any:
        def add(fd: int, callback: Callable[..., None], *args: Any) -> None:
            table[fd] = (callback, args, copy_context())
            self._look(fd)

        return add

    def _look(self, fd: int) -> None:
        """Level triggered: call back while there is something to be done."""
        sock = self.sockets.get(fd)
        if fd in self._readers and (self.gone(fd) or (sock is not None and sock.readable)):
            self._soon(self._call, self._readers, fd)
        if fd in self._writers and sock is not None and self._writable(sock):
            self._soon(self._call, self._writers, fd)

    def _writable(self, sock: SimSocket) -> bool:
        other = sock.other
        if other is None or other.closed or sock.inbox.ended:
            return True
        return len(other.inbox.arrived) + other.inbox.under_way < ROOM

    def _call(self, table: dict[int, Any], fd: int) -> None:
        found = table.get(fd)
        sock = self.sockets.get(fd)
        if found is None:
            return
        if table is self._readers:
            due = self.gone(fd) or (sock is not None and sock.readable)
        else:
            due = sock is not None and self._writable(sock)
        if due:
            callback, args, context = found
            context.run(callback, *args)
            if table.get(fd) is not None:
                self._look(fd)

    def poke(self, sock: SimSocket) -> None:
        """Something has changed for whoever waits at this end."""
        for thread in self.waiting.pop(sock.number, ()):
            thread.wake()
        self._look(sock.number)

    def _soon(self, callback: Callable[..., None], *args: Any) -> None:
        self.loop.call_soon(callback, *args, context=self._context)

    def _at(self, when: float, callback: Callable[..., None], *args: Any) -> None:
        self.loop.call_at(when, callback, *args, context=self._context)

    # -- connections and what happens to them ------------------------------------------------------------

    def connect(self, sock: SimSocket) -> None:
        if self.accept is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        theirs = SimSocket(self, sock.family, 1)
        sock.other, theirs.other = theirs, sock
        self._at(self.loop.time() + self.random.uniform(0, 1e-4), self._accepted, theirs)

    def _accepted(self, theirs: SimSocket) -> None:
        if self.accept is None or theirs.closed:
            theirs.close()
        else:
            self.accept(theirs)

    def carry(self, sock: SimSocket, data: bytes, descriptors: list[int]) -> None:
        """Take bytes to the other end, some time, as far as they get."""
        assert sock.other is not None
        box, source, faults = sock.other.inbox, self.random, self.faults
        tcp = sock.family != real.AF_UNIX
        if box.hushed:
            self.hit["silence"] += 1
        elif tcp and faults.hush and source.random() < faults.hush:
            self.hit["silence"] += 1
            box.hushed = True
        if box.hushed:
            for each in descriptors:
                os.close(each)
            return
        pause = source.uniform(0, 1e-4)
        if faults.slow and source.random() < faults.slow:
            pause += source.uniform(0, faults.slow_s)
        if tcp and faults.flip and source.random() < faults.flip:
            changed = bytearray(data)
            changed[source.randrange(len(data))] ^= 1 << source.randrange(8)
            data = bytes(changed)
            self.hit["flipped on the wire"] += 1
        pieces = [data]
        if len(data) > 1 and faults.tear and source.random() < faults.tear:
            at = source.randrange(1, len(data))
            pieces = [data[:at], data[at:]]
            self.hit["torn on the wire"] += 1
        cut = source.randrange(len(pieces)) if source.random() < faults.cut else -1
        box.under_way += len(data)
        at = max(box.clear_at, self.loop.time() + pause)
        for index, piece in enumerate(pieces):
            if index:
                at += source.uniform(0, 0.01)
            if index == cut:
                self._at(at, self._cut, sock)
                for each in descriptors:
                    os.close(each)
                box.under_way -= sum(map(len, pieces[index:]))
                return
            box.coming.append((piece, descriptors))
            self._at(at, self._arrive, sock.other)
            descriptors = []
        box.clear_at = at

    def _arrive(self, sock: SimSocket) -> None:
        box = sock.inbox
        data, descriptors = box.coming.popleft()  # timers of one moment have no order
        box.under_way -= len(data)
        if sock.closed or box.ended:
            for each in descriptors:
                os.close(each)
            return
        if descriptors:
            box.descriptors.append((len(box.arrived), descriptors))
        box.arrived += data
        self.poke(sock)

    def _cut(self, sock: SimSocket) -> None:
        """The connection breaks, for both ends."""
        if sock.other is None or (sock.closed and sock.other.closed):
            return
        self.hit["cut"] += 1
        for each in (sock, sock.other):
            if not each.closed:
                each.inbox.ended = True
                self.poke(each)

    def ends(self, sock: SimSocket) -> None:
        """One end has closed: the other reads what has arrived, then the end."""
        other = sock.other
        assert other is not None
        at = max(other.inbox.clear_at, self.loop.time() + self.random.uniform(0, 1e-4))
        self._at(at, self._ended, other)

    def _ended(self, sock: SimSocket) -> None:
        if not sock.closed:
            sock.inbox.ended = True
            self.poke(sock)

    def select_module(self) -> SimpleNamespace:
        """What stands for the module ``select`` in a client."""
        network = self

        class Poll:
            def register(self, fd: int, events: int) -> None:
                self.fd, self.events = fd, events

            def poll(self, milliseconds: float) -> list[int]:
                until = network.loop.time() + milliseconds / 1e3
                while not (ready := self._ready()) and network.loop.time() < until:
                    me = running()
                    network.waiting.setdefault(self.fd, []).append(me)
                    me.wait(until)
                return [self.fd] if ready else []

            def _ready(self) -> bool:
                sock = network.sockets.get(self.fd)
                if sock is None:
                    return True
                return sock.readable if self.events == select.POLLIN else network._writable(sock)

        return SimpleNamespace(POLLIN=select.POLLIN, POLLOUT=select.POLLOUT, poll=Poll)

    def socket_module(self) -> SimpleNamespace:
        """What stands for the module ``socket`` in a client."""

        def make(family: int, kind: int = real.SOCK_STREAM) -> SimSocket:
            return SimSocket(self, family, running().pid)

        def create_connection(address: Any, timeout: float) -> SimSocket:
            sock = make(real.AF_INET)
            sock.connect(address)
            return sock

        names = {name: getattr(real, name) for name in dir(real) if name.isupper()}
        return SimpleNamespace(**names, socket=make, create_connection=create_connection)
