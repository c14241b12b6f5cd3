"""A pretended server on a real socket: ``fakeredis`` behind RESP 2, for tests that must run without a server.

``fakeredis`` brings a server of its own, whose framing of long values is not RESP. What is pretended here is the store;
the protocol is real, and the laws that run on it run on real servers as well.
"""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self

import fakeredis
from redis.exceptions import ResponseError

STATUS = (b"OK", b"PONG")


class FakeServer(socketserver.ThreadingUnixStreamServer):
    """Serves on ``folder/fake.sock`` from the start of the block to its end."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "fake.sock")
        self.store = fakeredis.FakeServer()
        super().__init__(self.path, Conversation)

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def command(self, *words: str | bytes) -> Any:
        """Run one command behind everybody's back."""
        return answer(connection(self.store), words)

    def process_request(self, request: Any, client_address: Any) -> None:
        threading.Thread(
            target=self.process_request_thread, args=(request, client_address), name="fake-redis",
            daemon=True,
        ).start()  # fmt: skip

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, name="fake-redis", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()


class Conversation(socketserver.StreamRequestHandler):
    """One client."""

    server: FakeServer

    def handle(self) -> None:
        link = connection(self.server.store)
        try:
            for words in commands(self.rfile):
                self.wfile.write(encoded(answer(link, words)))
        except (ConnectionError, ValueError):
            return  # the client left in the middle of something


def connection(store: fakeredis.FakeServer) -> Any:
    """A connection of fakeredis, which answers in RESP 2."""
    return fakeredis.FakeRedisConnection(server=store, protocol=2)


def answer(link: Any, words: Any) -> Any:
    """What the store says; an error reply is an exception."""
    try:
        link.send_command(*words)
        return link.read_response()
    except ResponseError as error:
        return error


def commands(stream: Any) -> Iterator[list[bytes]]:
    """The commands of a client until it leaves."""
    while line := stream.readline():
        if line[:1] != b"*":
            raise ValueError(f"no command: {line!r}")
        yield [_word(stream) for _ in range(int(line[1:]))]


def _word(stream: BinaryIO) -> bytes:
    nbytes = int(stream.readline()[1:])
    word = stream.read(nbytes + 2)
    if len(word) != nbytes + 2:
        raise ConnectionError("the client left")
    return word[:-2]


def encoded(value: Any) -> bytes:
    """A reply in RESP 2: https://redis.io/docs/latest/develop/reference/protocol-spec/ ."""
    match value:
        case None:
            return b"$-1\r\n"
        case ResponseError():
            text = str(value)
            known = text.split(" ")[0].isupper()
            return f"-{'' if known else 'ERR '}{text}\r\n".encode()
        case int():
            return b":%d\r\n" % value
        case list() | tuple():
            return b"*%d\r\n" % len(value) + b"".join(map(encoded, value))
        case str():
            return encoded(value.encode())
        case bytes() if value in STATUS:
            return b"+%s\r\n" % value
    return b"$%d\r\n%s\r\n" % (len(value), value)
