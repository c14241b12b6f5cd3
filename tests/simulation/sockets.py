"""One end of a simulated connection, as the product sees a socket."""

from __future__ import annotations

import errno
import os
import socket as real
import struct
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tests.simulation.threads import running

if TYPE_CHECKING:
    from tests.simulation.network import Network

PEERPIDFD = 77
ROOM = 1 << 14
"""Bytes that a socket takes before its other end has read."""


class Pipe:
    """One direction: bytes on their way and bytes that have arrived."""

    def __init__(self) -> None:
        self.arrived = bytearray()
        self.under_way = 0
        self.clear_at = 0.0
        self.coming: deque[tuple[bytes, list[int]]] = deque()
        self.descriptors: deque[tuple[int, list[int]]] = deque()
        """(bytes before them in ``arrived``, descriptors)"""
        self.ended = self.hushed = False


class SimSocket:
    """One end of a connection. Blocking for threads of the simulation, not blocking for its loop."""

    def __init__(self, network: Network, family: int, owner: int) -> None:
        self.network = network
        self.family = family
        self.owner = owner
        self.closed = False
        self.other: SimSocket | None = None
        self.inbox = Pipe()
        self.blocking = True
        self.limits = {real.SO_RCVTIMEO: 0.0, real.SO_SNDTIMEO: 0.0}
        self.number = network.number(self)

    # -- as the product sees it ----------------------------------------------------------------------------

    def fileno(self) -> int:
        return self.number

    def setblocking(self, flag: bool) -> None:
        self.blocking = flag

    def settimeout(self, seconds: float | None) -> None:
        assert seconds is None

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        if option in self.limits:
            seconds, micros = struct.unpack("@qq", value)
            self.limits[option] = seconds + micros / 1e6

    def getsockopt(self, level: int, option: int, size: int = 0) -> Any:
        assert self.other is not None
        if option == PEERPIDFD:
            return self.network.pidfd(self.other.owner)
        assert option == real.SO_PEERCRED
        return struct.pack("3i", self.other.owner, os.geteuid(), 0)

    def getpeername(self) -> tuple[str, int]:
        assert self.other is not None
        return (f"10.0.0.{self.other.owner}", self.other.number)

    def connect(self, address: Any) -> None:
        self.network.connect(self)

    def send(self, data: Any) -> int:
        view = memoryview(data)
        self._sendable()
        assert self.other is not None
        room = ROOM - len(self.other.inbox.arrived) - self.other.inbox.under_way
        if room <= 0:
            raise BlockingIOError(errno.EAGAIN, "no room")
        self.network.carry(self, bytes(view[:room]), [])
        return min(room, view.nbytes)

    def sendmsg(self, buffers: Sequence[Any], ancillary: Sequence[Any] = ()) -> int:
        self._sendable()
        data = b"".join(buffers)
        found: list[int] = []
        for _, _, packed in ancillary:
            found += struct.unpack(f"{len(packed) // 4}i", packed)
        self.network.carry(self, data, [os.dup(each) for each in found])
        return len(data)

    def sendall(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        until = self._until(real.SO_SNDTIMEO)
        while view.nbytes:
            try:
                view = view[self.send(view) :]
                until = self._until(real.SO_SNDTIMEO)  # as the kernel does: anew for every part
            except BlockingIOError:
                self._wait(until)

    def recv_into(self, view: Any, nbytes: int = 0, flags: int = 0) -> int:
        return self._receive(memoryview(view), flags)

    def recvmsg_into(
        self, views: Sequence[Any], space: int = 0, flags: int = 0
    ) -> tuple[int, list[Any], int, None]:
        self._ready(flags, self._until(real.SO_RCVTIMEO))
        extra: list[Any] = []
        box = self.inbox
        while box.descriptors and not box.descriptors[0][0]:
            _, found = box.descriptors.popleft()
            packed = struct.pack(f"{len(found)}i", *found)
            extra.append((real.SOL_SOCKET, real.SCM_RIGHTS, packed))
        return self._take(memoryview(views[0])), extra, 0, None

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.network.forget(self)
        _drop(self.inbox)
        if self.other is not None:
            self.network.ends(self)
        self.network.poke(self)

    # -- inside --------------------------------------------------------------------------------------------

    def _sendable(self) -> None:
        if self.closed:
            raise OSError(errno.EBADF, "closed")
        if self.other is None or self.other.closed or self.inbox.ended:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    def _until(self, option: int) -> float | None:
        limit = self.limits[option]
        return self.network.loop.time() + limit if limit else None

    def _wait(self, until: float | None) -> None:
        if not self.blocking or (until is not None and self.network.loop.time() >= until):
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        me = running()
        self.network.waiting.setdefault(self.number, []).append(me)
        me.wait(until)
        if self.closed:
            raise OSError(errno.EBADF, "closed")

    @property
    def readable(self) -> bool:
        return bool(self.inbox.arrived) or self.inbox.ended

    def _ready(self, flags: int, until: float | None) -> None:
        if self.closed:
            raise OSError(errno.EBADF, "closed")
        while not self.readable:
            if flags & real.MSG_DONTWAIT:
                raise BlockingIOError(errno.EAGAIN, "nothing there")
            self._wait(until)

    def _receive(self, view: memoryview, flags: int) -> int:
        until = self._until(real.SO_RCVTIMEO)  # one limit for all of a call, as in the kernel
        done = 0
        while True:
            try:
                self._ready(flags, until)
            except BlockingIOError:
                if done:
                    return done
                raise
            got = self._take(view[done:])
            done += got
            if not got or done == view.nbytes or not flags & real.MSG_WAITALL:
                return done

    def _take(self, view: memoryview) -> int:
        box = self.inbox
        got = min(view.nbytes, len(box.arrived))
        view[:got] = box.arrived[:got]
        del box.arrived[:got]
        box.descriptors = deque((max(0, at - got), found) for at, found in box.descriptors)
        assert self.other is not None
        self.network.poke(self.other)  # there is room now
        return got


def _drop(pipe: Pipe) -> None:
    pipe.arrived.clear()
    for _, found in pipe.descriptors:
        for descriptor in found:
            os.close(descriptor)
    pipe.descriptors.clear()
