"""One connection to a daemon: blocking calls with a deadline, used by one thread at a time."""

from __future__ import annotations

import os
import re
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from lmcache_core.spi.errors import ConfigError, DeadlineExceeded, Unavailable
from lmcache_core.wire.address import Address
from lmcache_core.wire.codec import (
    LENGTH,
    NOTICES,
    DecodeError,
    Notice,
    Reply,
    decode_reply,
    frames,
)
from lmcache_core.wire.records import MOST_FRAME, Message, Record

_ROOM = 1 << 16
_MOST_DESCRIPTORS = 128
_CREDENTIALS = struct.Struct("3i")
_TIMEVAL = struct.Struct("@qq")
_COARSE = 9 / 8, 0.02
"""How late the kernel may end a call on a socket: a share of the time asked for, and ticks of its clock."""
_TLS_ALERT = re.compile(rb"\x15\x03.\x00\x02", re.DOTALL)
"""What a server of TLS answers to anything else."""
_SPEAKS_TLS = "it speaks TLS: write tls://HOST:PORT"
SILENCE_S = 10
"""After so long without a sign of life from its other end, a connection over TCP has failed."""
_KEEP_ALIVE = {
    "TCP_KEEPIDLE": SILENCE_S // 2, "TCP_KEEPALIVE": SILENCE_S // 2, "TCP_KEEPINTVL": 1,
    "TCP_KEEPCNT": SILENCE_S // 2, "TCP_USER_TIMEOUT": SILENCE_S * 1000,
}  # fmt: skip


class Link:
    """See the module.

    Args:
        notify: takes what the daemon says unasked.
        late: takes replies that nobody waits for any more.

    Attributes:
        failed: the connection is of no further use.
    """

    __slots__ = (
        "_begin", "_buffer", "_end", "_id", "_late", "_notify", "_socket", "_timeouts", "failed",
        "local",
    )  # fmt: skip

    def __init__(
        self,
        address: Address,
        /,
        *,
        timeout: float,
        notify: Callable[[Notice], None],
        late: Callable[[Reply], None],
    ) -> None:
        self.failed = False
        self.local = bool(address.path)
        self._notify = notify
        self._late = late
        self._id = 0
        self._buffer = bytearray(_ROOM)
        self._begin = self._end = 0
        self._timeouts = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}
        self._socket: Any
        try:
            if address.path:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                until = time.monotonic() + timeout
                self._arm(socket.SO_SNDTIMEO, until)  # a full backlog must not hold us
                self._socket.connect(address.path)
                self._check_peer(address)
            else:
                sock = socket.create_connection((address.host, address.port), timeout)
                self._socket = sock
                tune(sock)
                if address.tls:
                    from lmcache_core.wire import tls  # costs more than the rest of the client

                    self._socket = tls.connect(sock, address.host, address.ca)
                else:
                    sock.settimeout(None)
        except OSError as error:
            self.close()
            raise Unavailable(f"no daemon at {address}: {error.strerror or error}") from error
        except ConfigError:
            self.close()
            raise

    def _check_peer(self, address: Address) -> None:
        """The other end belongs to this user; a socket of anybody else is no daemon of ours."""
        uid = peer(self._socket)[1]
        if uid != os.geteuid():
            raise PermissionError(0, f"it is served by user {uid}, not {os.geteuid()}")

    def fileno(self) -> int:
        number: int = self._socket.fileno()
        return number

    def close(self) -> None:
        """End the connection; idempotent."""
        self.failed = True
        with suppress(OSError, AttributeError):
            self._socket.close()

    def send(
        self,
        parts: Sequence[bytes | bytearray | memoryview],
        until: float,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Send everything.

        Raises:
            Unavailable, DeadlineExceeded: not all of it went out; the connection has failed.
        """
        try:
            first, *more = parts
            if descriptors:
                self._arm(socket.SO_SNDTIMEO, until)
                rights = struct.pack(f"{len(descriptors)}i", *descriptors)
                sent = self._socket.sendmsg(
                    [first], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                )
                first = memoryview(first)[sent:]
            elif more and len(parts[-1]) < _ROOM:
                first, more = b"".join(parts), []
            for part in (first, *more):
                self._push(memoryview(part), until)
        except OSError as error:
            raise self._broken(error, "send") from error

    def call(
        self,
        make: Callable[[int], Message],
        until: float,
        /,
        *,
        before: Sequence[Record] = (),
        after: Sequence[memoryview] = (),
        descriptors: Sequence[int] = (),
        received: list[int] | None = None,
    ) -> Reply:
        """Send a request and wait for its reply.

        Args:
            make: builds the record around its id.
            until: monotonic time.
            before, after: one-way records in front, raw bytes behind.
            received: takes descriptors that come with the reply; the caller closes them.

        Raises:
            DeadlineExceeded: no reply in time; it is dropped when it comes.
            Unavailable: the connection has failed.
        """
        self._id += 1
        self.send([frames((*before, make(self._id))), *after], until, descriptors)
        while True:
            said = self.receive(until, received)
            if not isinstance(said, Message):
                self._notify(said)
            elif said.id == self._id:
                return said
            else:
                self._late(said)

    def post(self, record: Record, until: float, /) -> None:
        """Send a one-way record."""
        self.send([frames((record,))], until)

    def receive(self, until: float, received: list[int] | None = None, /) -> Reply | Notice:
        """The next record, whoever it is for."""
        try:
            length = LENGTH.size
            while self._end - self._begin < length:
                self._fill(length, until, received)
            (nbytes,) = LENGTH.unpack_from(self._buffer, self._begin)
            if nbytes > MOST_FRAME:
                raise OSError(0, f"a frame of {nbytes} bytes")
            length += nbytes
            while self._end - self._begin < length:
                self._fill(length, until, received)
        except OSError as error:
            if _TLS_ALERT.match(self._buffer, self._begin, self._end):
                raise self._broken(OSError(0, _SPEAKS_TLS), "receive") from error
            raise self._broken(error, "receive", keep=self.local or not until) from error
        begin = self._begin
        self._begin += length
        with memoryview(self._buffer) as view, view[begin + LENGTH.size : begin + length] as body:
            try:
                said: Reply | Notice = decode_reply(body)
                return said
            except DecodeError as error:
                raise self._broken(OSError(0, f"not understood: {error}"), "receive") from error

    def read_into(self, view: memoryview, until: float, /) -> None:
        """Take raw bytes that follow a reply."""
        have = min(view.nbytes, self._end - self._begin)
        view[:have] = memoryview(self._buffer)[self._begin : self._begin + have]
        self._begin += have
        try:
            while have < view.nbytes:
                self._arm(socket.SO_RCVTIMEO, until)
                try:
                    got = self._socket.recv_into(view[have:], 0, socket.MSG_WAITALL)
                except BlockingIOError:
                    self._wait(select.POLLIN, until)
                    continue
                if not got:
                    raise ConnectionResetError(0, "closed in the middle of a value")
                have += got
        except OSError as error:
            self.close()
            raise self._broken(error, "receive") from error

    def poll(self) -> None:
        """Handle what has come unasked, without waiting; a closed connection has ``failed`` then."""
        with suppress(DeadlineExceeded, Unavailable):
            while True:
                said = self.receive(0.0)
                if isinstance(said, NOTICES):
                    self._notify(said)
                else:
                    self._late(said)

    def _fill(self, length: int, until: float, received: list[int] | None) -> None:
        """Receive at least something; make room for a frame of ``length`` first."""
        if self._begin == self._end:
            self._begin = self._end = 0
        if self._begin + length > len(self._buffer):
            left = self._end - self._begin
            self._buffer[:left] = self._buffer[self._begin : self._end]
            self._begin, self._end = 0, left
            if length > len(self._buffer):
                self._buffer.extend(bytes(length - len(self._buffer)))
        flags = 0
        if until:
            self._arm(socket.SO_RCVTIMEO, until)
        else:
            flags = socket.MSG_DONTWAIT
        try:
            if received is None and not self._end:  # mostly
                got = self._socket.recv_into(self._buffer, 0, flags)
            elif received is None:
                with memoryview(self._buffer) as view, view[self._end :] as room:
                    got = self._socket.recv_into(room, 0, flags)
            else:
                with memoryview(self._buffer) as view, view[self._end :] as room:
                    space = socket.CMSG_SPACE(4 * _MOST_DESCRIPTORS)
                    got, extra, _, _ = self._socket.recvmsg_into([room], space, flags)
                    for level, kind, data in extra:
                        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                            received += struct.unpack(f"{len(data) // 4}i", data[: len(data) & ~3])
        except BlockingIOError:
            if not until:
                raise
            return self._wait(select.POLLIN, until)
        if not got:
            raise ConnectionResetError(0, "closed by the daemon")
        self._end += got

    def _push(self, view: memoryview, until: float) -> None:
        """Send all of it."""
        while view:
            self._arm(socket.SO_SNDTIMEO, until)
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, until)

    def _arm(self, option: int, until: float) -> None:
        """Let the kernel end the next call before ``until``; asked anew only when that matters.

        Early enough that it is not late; ``_wait`` is for the rest.
        """
        seconds = until - time.monotonic()
        if seconds <= 0:
            raise BlockingIOError(0, "no time left")
        share, ticks = _COARSE
        most = max((seconds - ticks) / share, 1e-5)
        if not most / 1.02 <= self._timeouts[option] <= most:
            seconds = max(most / 1.01, 1e-5)
            micros = int(seconds * 1e6)
            value = _TIMEVAL.pack(micros // 1_000_000, micros % 1_000_000)
            self._socket.setsockopt(socket.SOL_SOCKET, option, value)
            self._timeouts[option] = seconds

    def _wait(self, events: int, until: float) -> None:
        """Wait by the clock of ``poll``, which is fine enough, until the socket is ready or it is time to say so.

        Raises:
            BlockingIOError: it is not.
        """
        poll = select.poll()
        poll.register(self._socket.fileno(), events)
        left = max(0.0, until - time.monotonic()) * 1e3
        if not poll.poll(left - min(2.0, left / 16)):  # whoever is told late is late
            raise BlockingIOError(0, "no time left")

    def _broken(
        self, error: OSError, verb: str, *, keep: bool = False
    ) -> Unavailable | DeadlineExceeded:
        if isinstance(error, BlockingIOError):
            if not keep:
                self.close()  # half a frame may be out, or half a value under way
            return DeadlineExceeded("the daemon did not answer in time", operation=verb)
        self.close()
        return Unavailable(f"the daemon is gone: {error.strerror or error}", operation=verb)


def tune(connection: socket.socket, /) -> None:
    """Send small frames at once, and have the kernel prove that the other end of TCP is there (both ends do).

    A machine that has lost its power or its network says nothing: no probe is answered then, and nothing that was
    sent is taken. Either fails the connection after ``SILENCE_S`` and at most a probe more.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, amount in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), amount)


def peer(connection: socket.socket, /) -> tuple[int, int]:
    """pid and uid of the process at the other end of a unix socket."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid
