"""InfiniStore's protocol on one TCP connection: values go out of, and come straight into, the caller's memory.

Protocol: the files ``protocol.h``, ``tcp_payload_request.fbs`` and ``delete_keys.fbs`` of
https://github.com/bytedance/InfiniStore . A request is a header (magic, operation, length of the body) and a body,
a FlatBuffers table or a bare key. Written here, because the project's own client waits for ever for an absent key,
knows no time limit, and requires torch.

Two things end the server, for all its clients (version 0.2.35): a request for a value that is still on its way to it, or
that its writer never finished; and a connection that ends while the server sends a value on it. So short values travel in
one piece with their request, and a connection on which a value comes is not closed but kept, with what is still owed.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Sequence

HEADER = struct.Struct("<IcI")
MAGIC = 0xDEADBEEF
CHECK, DELETE, PAYLOAD = b"C", b"X", b"L"
PUT, GET = b"P", b"G"
DONE, ABSENT, FULL = 200, 404, 507
CODE = struct.Struct("<i")
PAIR = struct.Struct("<iI")
BODY_MOST = 4 << 20
"""Longest body of a request."""
SHORT = 64
"""Longest value that travels with its request: a marker."""
PIECE = 1 << 20
"""What a time limit of sending is meant for."""
STEP_S = 0.05
"""How often a thread that waits for a value looks whether anybody waits for the thread."""


class Broken(ConnectionError):
    """The connection is of no further use."""


def payload_body(operation: bytes, name: bytes, nbytes: int) -> bytes:
    """A table of key, length and operation: root, vtable, table, string."""
    vtable = struct.pack("<HHHHH", 10, 16, 4, 8, 12)
    table = struct.pack("<iIic3x", 10, 12, nbytes, operation)
    return struct.pack("<Ixx", 16) + vtable + table + _string(name)


def delete_body(names: Sequence[bytes]) -> bytes:
    """A table of one vector of strings."""
    strings, offsets, at = [], [], 4 * len(names)
    for number, name in enumerate(names):
        offsets.append(at - 4 * number)  # from its own place
        strings.append(_string(name))
        at += len(strings[-1])
    vector = struct.pack(f"<I{len(names)}I", len(names), *offsets)
    head = struct.pack("<Ixx", 12) + struct.pack("<HHH", 6, 8, 4) + struct.pack("<iI", 6, 4)
    return head + vector + b"".join(strings)


def _string(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text + bytes(4 - len(text) % 4)


class Link:
    """Used by one thread at a time; ``interrupt`` may come from any.

    Raises:
        OSError: the server cannot be reached, was silent for ``timeout`` seconds or is gone, or nobody waits any more.
            Then the connection is of no further use, unless it is ``owing``.
    """

    def __init__(self, place: tuple[str, int], timeout: float) -> None:
        self.keep, self.cut, self.shut = True, False, False
        self._timeout = timeout
        self._lock = threading.Lock()
        self._asked = False  # for a value, of which the length has not come yet
        self._raw = bytearray()  # of code and length
        self._owed = 0
        self._socket = socket.create_connection(place, timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def owing(self) -> bool:
        """Whether the server sends, or is about to send, a value that was not taken yet."""
        return self._asked or self._owed > 0

    def close(self) -> None:
        self._socket.close()

    def interrupt(self) -> None:
        """End whatever waits on the connection, soon. One on which a value comes is left in working order."""
        with self._lock:
            self.cut = True
            if self.owing:
                return
            self.shut = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended already

    def settle(self) -> None:
        """Take what is still owed, for another call to use the connection."""
        if self._asked:
            self._length()
        self.discard(self._owed)

    def put(self, name: bytes, parts: Sequence[memoryview]) -> int:
        """Write a value, over one that is there; the server shows it before it is whole. Returns the code."""
        nbytes = sum(part.nbytes for part in parts)
        short = b"".join(parts) if nbytes <= SHORT else b""
        try:
            self._ask(PAYLOAD, payload_body(PUT, name, nbytes), short)
            for part in parts if not short else ():
                for at in range(0, part.nbytes, PIECE):
                    self._socket.sendall(part[at : at + PIECE])
        except ConnectionError:
            self.keep = False
            if self.cut or not self._refused():
                raise
            return FULL
        (code,) = CODE.unpack(self._take(CODE.size))
        if code != DONE:  # it takes the value for requests
            self.keep = False
        return int(code)

    def size(self, name: bytes) -> int | None:
        """Begin to read a value; its bytes are taken next, by ``fill``, or else by ``settle``. None: it is not there."""
        self._ask(PAYLOAD, payload_body(GET, name, 0), asked=True)
        return self._length()

    def _length(self) -> int | None:
        """The answer to a request for a value; goes on where it was cut."""
        while len(self._raw) < (wanted := CODE.size if self._code() != DONE else PAIR.size):
            piece = bytearray(wanted - len(self._raw))
            self._raw += piece[: self._receive(memoryview(piece))]
        code, self._owed = self._code(), int.from_bytes(self._raw[CODE.size :], "little")
        self._asked = False
        self._raw.clear()
        if code not in (DONE, ABSENT):
            raise Broken(f"the server said {code}")
        return self._owed if code == DONE else None

    def _code(self) -> int:
        return int(CODE.unpack_from(self._raw)[0]) if len(self._raw) >= CODE.size else ABSENT

    def fill(self, views: Sequence[memoryview]) -> None:
        """Take as many bytes of the value as the views have."""
        for view in views:
            got = 0
            while got < view.nbytes:
                more = self._receive(view[got:])
                got += more
                self._owed -= more

    def discard(self, nbytes: int) -> None:
        """Take bytes that nobody wants."""
        scratch = memoryview(bytearray(min(nbytes, 1 << 20)))
        while nbytes:
            self.fill([scratch[: min(nbytes, scratch.nbytes)]])
            nbytes -= min(nbytes, scratch.nbytes)

    def exists(self, name: bytes) -> bool:
        self._ask(CHECK, name)
        code, absent = PAIR.unpack(self._take(PAIR.size))
        if code != DONE:
            raise Broken(f"the server said {code}")
        return not absent

    def delete(self, names: Sequence[bytes]) -> int:
        """Forget values; how many were there."""
        self._ask(DELETE, delete_body(names))
        code, count = PAIR.unpack(self._take(PAIR.size))
        if code != DONE:
            raise Broken(f"the server said {code}")
        return int(count)

    def _ask(
        self, operation: bytes, body: bytes, more: bytes = b"", /, asked: bool = False
    ) -> None:
        with self._lock:
            if self.cut:
                raise Broken("nobody waits for it")
            self._asked = asked
        self._socket.settimeout(self._timeout)
        try:
            self._socket.sendall(HEADER.pack(MAGIC, operation, len(body)) + body + more)
        except OSError:
            self._asked = False
            raise

    def _refused(self) -> bool:
        """Whether the server said that it is full before it ended a connection on which a value came."""
        try:
            return self._take(CODE.size) == CODE.pack(FULL)
        except OSError:
            return False

    def _take(self, nbytes: int) -> bytes:
        """A short answer."""
        whole = bytearray(nbytes)
        got = 0
        while got < nbytes:
            got += self._receive(memoryview(whole)[got:])
        return bytes(whole)

    def _receive(self, view: memoryview) -> int:
        """Wait for the next bytes; only while somebody waits for them."""
        self._socket.settimeout(STEP_S)
        end = time.monotonic() + self._timeout
        while True:
            if self.cut:
                raise Broken("nobody waits for it")
            try:
                got = self._socket.recv_into(view)
            except TimeoutError:
                if time.monotonic() > end:
                    raise
                continue
            except OSError:
                self._asked, self._owed = False, 0
                raise
            if not got:
                self._asked, self._owed = False, 0
                raise Broken("the server closed the connection")
            return got
