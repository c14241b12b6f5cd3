"""InfiniStore's protocol on one TCP connection: values go out of, and come straight into, the caller's memory.

Protocol: the files ``protocol.h``, ``tcp_payload_request.fbs`` and ``delete_keys.fbs`` of
https://github.com/bytedance/InfiniStore . A request is a header (magic, operation, length of the body) and a body,
a FlatBuffers table or a bare key. Written here, because the project's own client waits for ever for an absent key,
knows no time limit, and requires torch.
"""

from __future__ import annotations

import socket
import struct
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
        OSError: the server cannot be reached, was silent for ``timeout`` seconds or is gone; then, and where ``keep``
            is False, the connection is of no further use.
    """

    def __init__(self, place: tuple[str, int], timeout: float) -> None:
        self.keep, self.cut = True, False
        self._socket = socket.create_connection(place, timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        self._socket.close()

    def interrupt(self) -> None:
        """End whatever waits on the connection, at once."""
        self.cut = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended already

    def put(self, name: bytes, parts: Sequence[memoryview]) -> int:
        """Write a value, over one that is there; the server shows it before it is whole. Returns the code."""
        body = payload_body(PUT, name, sum(part.nbytes for part in parts))
        self._ask(PAYLOAD, body)
        for part in parts:
            self._socket.sendall(part)
        (code,) = CODE.unpack(self._take(CODE.size))
        if code != DONE:  # it takes the value for requests
            self.keep = False
        return int(code)

    def size(self, name: bytes) -> int | None:
        """Begin to read a value; its bytes must be taken next, by ``fill``. None: it is not there."""
        self._ask(PAYLOAD, payload_body(GET, name, 0))
        (code,) = CODE.unpack(self._take(CODE.size))
        if code == ABSENT:
            return None
        if code != DONE:
            raise Broken(f"the server said {code}")
        return int.from_bytes(self._take(4), "little")

    def fill(self, views: Sequence[memoryview]) -> None:
        """Take as many bytes as the views have."""
        for view in views:
            got = 0
            while got < view.nbytes:
                more = self._socket.recv_into(view[got:])
                if not more:
                    raise Broken("the server closed the connection")
                got += more

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

    def _ask(self, operation: bytes, body: bytes) -> None:
        self._socket.sendall(HEADER.pack(MAGIC, operation, len(body)) + body)

    def _take(self, nbytes: int) -> bytes:
        whole = bytearray(nbytes)
        self.fill([memoryview(whole)])
        return bytes(whole)
