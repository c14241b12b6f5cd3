"""A pretended server on a real socket, by what the real one's source says; and a pretended RDMA connection to it.

Like the real one it shows a value while it still receives it, answers a request for an absent one with a code alone, and
dies of a request for a value that is not whole and of a connection that ends while it sends a value.
"""

from __future__ import annotations

import ctypes
import socketserver
import struct
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Self

from lmcache_backend_infinistore.link import (
    ABSENT,
    CHECK,
    CODE,
    DELETE,
    DONE,
    FULL,
    GET,
    HEADER,
    MAGIC,
    PAIR,
    PAYLOAD,
    PUT,
)

LONG = 1 << 20


class FakeServer(socketserver.ThreadingTCPServer):
    """Serves on a free port of the loopback from the start of the block to its end.

    Args:
        limit: bytes after which it is full; it does not evict.

    Attributes:
        halves: names of values that are not whole.
        going: cleared, it stops in the middle of long values.
        died: of what; then it serves nobody, and the end of the block raises ``AssertionError``.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, limit: int | None = None) -> None:
        self.values: dict[bytes, bytearray] = {}
        self.halves: set[bytes] = set()
        self.going = threading.Event()
        self.going.set()
        self.died = ""
        self.limit = limit
        super().__init__(("127.0.0.1", 0), Conversation)

    @property
    def url(self) -> str:
        return f"infinistore://127.0.0.1:{self.server_address[1]}"

    def room(self, nbytes: int) -> bool:
        """Whether so many bytes more fit."""
        return self.limit is None or sum(map(len, self.values.values())) + nbytes <= self.limit

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True, name="fake-infinistore").start()
        return self

    def __exit__(self, *error: object) -> None:
        self.going.set()
        self.shutdown()
        self.server_close()
        assert not self.died, self.died

    def die(self, why: str) -> None:
        self.died = self.died or why
        raise ConnectionAbortedError(why)


class Conversation(socketserver.StreamRequestHandler):
    """One client."""

    server: FakeServer

    def handle(self) -> None:
        threading.current_thread().name = "fake-infinistore"
        while len(head := self.rfile.read(HEADER.size)) == HEADER.size:
            magic, operation, nbytes = HEADER.unpack(head)
            if magic != MAGIC or self.server.died:
                return  # a value that was taken for requests
            try:
                self._answer(operation, self.rfile.read(nbytes))
            except OSError:
                return

    def _answer(self, operation: bytes, body: bytes) -> None:
        values = self.server.values
        if operation == DELETE and self.server.halves.intersection(names_of(body)):
            self.server.die("a value was deleted before it was whole")
        if operation == CHECK:
            self.wfile.write(PAIR.pack(DONE, body not in values))
        elif operation == DELETE:
            gone = [values.pop(name, None) for name in names_of(body)]
            self.wfile.write(PAIR.pack(DONE, sum(one is not None for one in gone)))
        elif operation == PAYLOAD:
            self._move(*request_of(body))

    def _move(self, verb: bytes, name: bytes, nbytes: int) -> None:
        values = self.server.values
        if verb == GET:
            value = values.get(name)
            if value is None:
                self.wfile.write(CODE.pack(ABSENT))
            elif name in self.server.halves:
                self.server.die("a value was asked for before it was whole")
            else:
                half = len(value) // 2
                try:
                    self.wfile.write(PAIR.pack(DONE, len(value)) + value[:half])
                    if half > LONG:
                        self.server.going.wait()
                    self.wfile.write(value[half:])
                except OSError:
                    self.server.die("a connection ended while a value came on it")
        elif verb == PUT:
            if not self.server.room(nbytes):
                self.wfile.write(CODE.pack(FULL))
                return
            value = values[name] = bytearray(nbytes)
            self.server.halves.add(name)
            view, got = memoryview(value), 0
            while got < nbytes and (more := self.rfile.readinto1(view[got:])):
                got += more
                if got > LONG:
                    self.server.going.wait()
            if got == nbytes:
                self.server.halves.discard(name)
                self.wfile.write(CODE.pack(DONE))


class FakeRdma:
    """``InfinityConnection`` after ``connect``: copies memory that was registered, on a thread."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._regions: list[tuple[int, int]] = []
        self.conn = SimpleNamespace(
            register_mr=self._register, w_rdma_async=self._write, r_rdma_async=self._read
        )

    def close(self) -> None:
        self._regions.clear()

    def _register(self, place: int, nbytes: int) -> int:
        self._regions.append((place, nbytes))
        return 0

    def _write(self, names: Sequence[str], offsets: Any, size: int, place: int, done: Any) -> int:
        def copy() -> int:
            if not self._server.room(size):
                return FULL
            self._server.values[names[0].encode()] = bytearray(ctypes.string_at(place, size))
            return DONE

        return self._later(copy, place, size, done)

    def _read(self, names: Sequence[str], offsets: Any, size: int, place: int, done: Any) -> int:
        def copy() -> int:
            value = self._server.values.get(names[0].encode())
            if value is None:
                return ABSENT
            ctypes.memmove(place, bytes(value), size)
            return DONE

        return self._later(copy, place, size, done)

    def _later(
        self, copy: Callable[[], int], place: int, size: int, done: Callable[[int], None]
    ) -> int:
        if not any(a <= place and place + size <= a + n for a, n in self._regions):
            return -1
        threading.Thread(target=lambda: done(copy()), name="fake-infinistore").start()
        return 0


def request_of(body: bytes) -> tuple[bytes, bytes, int]:
    """(operation, name, length) of a table, by its offsets."""
    table, fields = _table(body)
    (nbytes,) = struct.unpack_from("<i", body, table + fields[1]) if fields[1] else (0,)
    return body[table + fields[2] :][:1], _string(body, table + fields[0]), nbytes


def names_of(body: bytes) -> list[bytes]:
    """The strings of a table's one vector."""
    table, fields = _table(body)
    vector = table + fields[0] + struct.unpack_from("<I", body, table + fields[0])[0]
    (count,) = struct.unpack_from("<I", body, vector)
    return [_string(body, vector + 4 + 4 * number) for number in range(count)]


def _table(body: bytes) -> tuple[int, tuple[int, ...]]:
    (table,) = struct.unpack_from("<I", body)
    (back,) = struct.unpack_from("<i", body, table)
    (nbytes,) = struct.unpack_from("<H", body, table - back)
    return table, struct.unpack_from(f"<{nbytes // 2 - 2}H", body, table - back + 4)


def _string(body: bytes, at: int) -> bytes:
    at += struct.unpack_from("<I", body, at)[0]
    (nbytes,) = struct.unpack_from("<I", body, at)
    return body[at + 4 : at + 4 + nbytes]
