"""A connection to a target."""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from typing import Any

from lmcache_backend_nixl.wire import VERSION, Unpacker, pack
from lmcache_core.spi import ConfigError, Unavailable

PIECE = 1 << 18


class Link:
    """Messages to a target and its answers; used by one thread at a time.

    Args:
        introduction: name, plugin and description of this side's agent; empty where no memory is moved.

    Raises:
        ConfigError: it is no target, or does not let us in.
        Unavailable: nobody answers.
    """

    def __init__(
        self,
        host: tuple[str, int],
        token: str,
        timeout: float,
        /,
        introduction: tuple[str, str, bytes],
    ) -> None:
        self.where = f"{host[0]}:{host[1]}"
        self.problem = ""
        self.heard = 0.0
        """When something came last."""
        self.answers: dict[int, list[Any]] = {}
        self._number = 0
        self._timeout = timeout
        self._out: deque[memoryview] = deque()
        self._queue: list[Any] = []
        self._unpacker = Unpacker()
        try:
            self.socket = socket.create_connection(host, timeout)
        except OSError as error:
            raise Unavailable(f"target {self.where} cannot be reached: {error}") from None
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        try:
            welcome = self.ask("hello", VERSION, token, *introduction)
        except Unavailable:
            self.close("not let in")
            raise
        if welcome[0] != "welcome":
            self.close("not let in")
            raise ConfigError(f"target {self.where}: {welcome[1]}")
        self.peer, self.description = str(welcome[1]), bytes(welcome[2])

    def queue(self, *message: Any) -> int:
        """Send a message with the next ``flush``; returns its number."""
        self._number += 1
        self._queue.append([self._number, *message])
        return self._number

    def flush(self) -> bool:
        """Send what can be sent now; whether there was anything."""
        if self._queue:
            self._out.append(memoryview(pack(self._queue)))
            self._queue = []
        sent = bool(self._out)
        try:
            while self._out and not self.problem:
                rest = self._out[0][self.socket.send(self._out[0]) :]
                if rest:
                    self._out[0] = rest
                else:
                    self._out.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            self.close(str(error))
        return sent

    def pump(self) -> bool:
        """Take what has come, and tell whether there was anything; sets ``problem`` at the end of the connection."""
        heard = self.heard
        try:
            while not self.problem:
                if not (data := self.socket.recv(PIECE)):
                    self.close("it has closed the connection")
                    break
                self.heard = time.monotonic()
                for number, *answer in self._unpacker.feed(data):
                    self.answers[number] = answer
        except BlockingIOError:
            pass
        except (OSError, ValueError) as error:
            self.close(str(error))
        return self.heard != heard

    def ask(self, *message: Any) -> list[Any]:
        """Send a message and wait for its answer."""
        number, end = self.queue(*message), time.monotonic() + self._timeout
        waiting = select.poll()  # `select` takes no descriptor above 1023
        if not self.problem:
            waiting.register(self.socket, select.POLLIN)
        while number not in self.answers:
            if not self.problem and time.monotonic() > end:
                self.close(f"no answer within {self._timeout:g} s")
            self.check()
            self.flush()
            if not self.problem:
                waiting.poll(50)
                self.pump()
        return self.answers.pop(number)

    def check(self) -> None:
        """Raise ``Unavailable`` after the end of the connection."""
        if self.problem:
            raise Unavailable(f"target {self.where}: {self.problem}")

    def close(self, problem: str) -> None:
        """Idempotent."""
        if not self.problem:
            self.problem = problem
            self.socket.close()
