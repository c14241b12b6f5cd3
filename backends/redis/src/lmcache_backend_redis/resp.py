"""RESP 2 on one connection: values go out of, and come straight into, the caller's memory.

Protocol: https://redis.io/docs/latest/develop/reference/protocol-spec/ . The connection itself (address, TLS, login,
database) is redis-py's; a value never becomes a Python object here, because making one costs more than the transfer.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_core.spi import Unavailable

ROOM = 16384
LONGEST = 512 << 20
"""Most bytes of one bulk, by the protocol's default."""
SHORT = 1 << 20
"""Most bytes, or items, of a reply that is no value."""
DEPTH = 8
"""Most levels of a nested reply."""


class Broken(ConnectionError):
    """The connection is of no further use: closed, silent for too long, or not speaking the protocol."""


@dataclass(frozen=True, slots=True)
class Said:
    """An error reply: the first word, and all of it."""

    code: str
    text: str

    def unavailable(self, operation: str) -> Unavailable:
        """The error of a verb that got this reply."""
        return Unavailable(
            f"server said: {self.text}", operation=operation, retryable=self.code in TEMPORARY
        )


TEMPORARY = ("LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "MOVED", "ASK")

Reply = int | bytes | None | Said | list[Any]


def command(*words: bytes) -> bytes:
    """A whole command."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)


class Link:
    """One connection, used by one thread at a time; ``interrupt`` may come from any.

    Args:
        connection: of redis-py, not yet connected; speaks RESP 2.
        timeout: longest silence, in seconds.

    Raises:
        RedisError: it cannot connect or log in.
        Broken: from every other method; the connection is then closed for good.
    """

    def __init__(self, connection: Any, timeout: float) -> None:
        connection.connect()
        self.keep = True
        """False: not to be used again, although nothing is broken."""
        self._connection = connection
        self._socket: socket.socket = connection._sock  # no public name for it
        self.unix = self._socket.family == socket.AF_UNIX
        self._wait = 0
        self._timeout = timeout
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.settimeout(timeout)
        else:
            # The kernel keeps the time, so that one call moves a whole value.
            self._socket.settimeout(None)
            limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6) or int(timeout < 1))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._wait = socket.MSG_WAITALL
        self._bytes = bytearray(ROOM)
        self._room = memoryview(self._bytes)
        self._start = self._end = 0

    @property
    def clean(self) -> bool:
        """Whether nothing came unasked: not even the end of the connection."""
        if self._start != self._end:
            return False
        try:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            return not poll.poll(0)
        except (OSError, ValueError):
            return False

    def interrupt(self) -> None:
        """End whatever waits on the connection, at once."""
        try:
            # Not through an SSL socket, whose own method would also change its state under the reader.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        except OSError:
            return  # it has ended already

    def close(self) -> None:
        self._connection.disconnect()

    def send(self, *views: bytes | memoryview) -> None:
        """Send everything."""
        try:
            for view in views:
                self._socket.sendall(view)
        except OSError as error:
            raise self._broken(error) from error

    def reply(self, depth: int = 0) -> Reply:
        """Read a reply whole; meant for short ones."""
        kind, rest = self._line()
        if kind in b"+":
            return rest
        if kind == b"-":
            return said(rest)
        number = _number(rest)
        if kind == b":":
            return number
        if number < 0:
            return None
        if kind == b"$":
            whole = bytearray(_bounded(number, SHORT))
            self.fill([memoryview(whole)])
            return bytes(whole)
        if kind == b"*" and depth < DEPTH:
            return [self.reply(depth + 1) for _ in range(_bounded(number, SHORT))]
        raise Broken(f"no reply begins with {kind!r}")

    def bulk(self) -> int | Said | None:
        """Read the length of a bulk reply; its bytes must be taken next, by ``fill`` or ``discard``."""
        kind, rest = self._line()
        if kind == b"-":
            return said(rest)
        if kind != b"$":
            raise Broken(f"expected a value, got {kind + rest[:20]!r}")
        number = _number(rest)
        return None if number < 0 else _bounded(number, LONGEST)

    def fill(self, views: Sequence[memoryview]) -> None:
        """Take a bulk whose length is that of all views together."""
        for view in views:
            got = min(view.nbytes, self._end - self._start)
            view[:got] = self._room[self._start : self._start + got]
            self._start += got
            while got < view.nbytes:
                got += self._receive(view[got:], self._wait)
        if self._take(2) != b"\r\n":
            raise Broken("a value did not end where it said")

    def discard(self, nbytes: int) -> None:
        """Take a bulk that nobody wants."""
        scratch = memoryview(bytearray(min(nbytes, 1 << 20)))
        while nbytes > scratch.nbytes:
            got = min(scratch.nbytes, self._end - self._start)
            self._start += got
            nbytes -= got or self._receive(scratch, 0)
        self.fill([scratch[:nbytes]])

    def _line(self) -> tuple[bytes, bytes]:
        """Kind and rest of the next line."""
        line = b""
        while True:
            end = self._bytes.find(b"\n", self._start, self._end) + 1
            line += self._room[self._start : end or self._end]
            if end:
                self._start = end
                break
            if len(line) > ROOM:
                raise Broken("a line of the reply does not end")
            self._more()
        if len(line) < 3 or line[-2:] != b"\r\n":
            raise Broken(f"no reply: {line[:20]!r}")
        return line[:1], line[1:-2]

    def _take(self, nbytes: int) -> bytes:
        taken = b""
        while len(taken) < nbytes:
            if self._start == self._end:
                self._more()
            end = min(self._end, self._start + nbytes - len(taken))
            taken += self._room[self._start : end]
            self._start = end
        return taken

    def _more(self) -> None:
        self._start, self._end = 0, 0
        self._end = self._receive(self._room, 0)

    def _receive(self, view: memoryview, flags: int) -> int:
        try:
            got = self._socket.recv_into(view, 0, flags)
        except OSError as error:
            raise self._broken(error) from error
        if not got:
            raise Broken("the server closed the connection")
        return got

    def _broken(self, error: OSError) -> Broken:
        if isinstance(error, (TimeoutError, BlockingIOError)):
            return Broken(f"no word from the server for {self._timeout:g} s")
        return Broken(f"connection lost: {error.strerror or error}")


def said(text: bytes) -> Said:
    """An error reply."""
    whole = text.decode("ascii", "replace")[:200]
    return Said(whole.partition(" ")[0], whole)


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise Broken(f"no number: {text[:20]!r}") from None


def _bounded(number: int, most: int) -> int:
    if number > most:
        raise Broken(f"a reply of {number} bytes or items is too long")
    return number
