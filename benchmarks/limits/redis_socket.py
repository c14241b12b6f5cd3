"""What a connection to Redis gives: one value after another, nothing kept.

Into one small buffer, which stays in the processor's cache, and into the values' own memory, as a cache needs them.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from lmcache_core.spi import Key


class Socket:
    """A bare loop on one connection; a ``Mover`` of ``benchmarks/tiers.py``."""

    fills = False

    def __init__(self, address: str | tuple[str, int], name: str = "bare socket") -> None:
        self.name = name
        self._socket = socket.socket(
            socket.AF_UNIX if isinstance(address, str) else socket.AF_INET, socket.SOCK_STREAM
        )
        self._socket.connect(address)
        if not isinstance(address, str):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def store(self, keys: Sequence[Key], values: Sequence[memoryview]) -> None:
        for key, value in zip(keys, values, strict=True):
            head = b"*3\r\n$3\r\nSET\r\n$132\r\n%s\r\n$%d\r\n" % (key.text.encode(), value.nbytes)
            self._socket.sendall(head)
            self._socket.sendall(value)
            self._socket.sendall(b"\r\n")
            assert self._socket.recv(64) == b"+OK\r\n"

    def load(self, keys: Sequence[Key], into: Sequence[memoryview]) -> None:
        nbytes = into[0].nbytes
        head = b"$%d\r\n" % nbytes
        whole = len(head) + nbytes + 2
        if not hasattr(self, "_buffer") or self._buffer.nbytes != whole:
            self._buffer = memoryview(bytearray(whole))
        buffer = self._buffer
        for key in keys:
            self._socket.sendall(b"*2\r\n$3\r\nGET\r\n$132\r\n%s\r\n" % key.text.encode())
            got = 0
            while got < whole:
                got += self._socket.recv_into(buffer[got:])
            assert buffer[: len(head)] == head

    def clear(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._socket.sendall(b"*2\r\n$6\r\nUNLINK\r\n$132\r\n%s\r\n" % key.text.encode())
            assert self._socket.recv(64) == b":1\r\n"

    def close(self) -> None:
        self._socket.close()


class Scattered(Socket):
    """The same, each value into memory of its own."""

    fills = True

    def load(self, keys: Sequence[Key], into: Sequence[memoryview]) -> None:
        nbytes = into[0].nbytes
        head = memoryview(bytearray(len(b"$%d\r\n" % nbytes)))
        for key, view in zip(keys, into, strict=True):
            self._socket.sendall(b"*2\r\n$3\r\nGET\r\n$132\r\n%s\r\n" % key.text.encode())
            for part in (head, view, head[:2]):
                got = 0
                while got < part.nbytes:
                    got += self._socket.recv_into(part[got:])
