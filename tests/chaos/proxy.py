"""A proxy before a server, with faults at will: connections cut, replies late, garbled, or never."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque


class Proxy:
    """Passes bytes between clients and ``target`` on a thread of its own.

    Attributes:
        port: where it listens on this machine.
        delay: seconds every reply is held back.
        garble: replies become noise of the same length.
        stalled: nothing passes in either direction.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.delay, self.garble, self.stalled = 0.0, False, False
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._inward: set[socket.socket] = set()
        self._late: deque[tuple[float, socket.socket, bytes]] = deque()
        self._lock = threading.RLock()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """End every connection there is."""
        with self._lock:
            for each in list(self._pairs):
                self._close(each)

    def close(self) -> None:
        self._over = True
        self._thread.join()
        self.cut()
        self._listener.close()

    def _run(self) -> None:
        while not self._over:
            with self._lock, selectors.DefaultSelector() as ready:
                ready.register(self._listener, selectors.EVENT_READ)
                if not self.stalled:
                    for each in self._pairs:
                        ready.register(each, selectors.EVENT_READ)
                found = [key.fileobj for key, _ in ready.select(0.002)]
                for each in found:
                    if each is self._listener:
                        self._accept()
                    elif each in self._pairs:
                        self._pass(each)  # type: ignore[arg-type]
                now = time.monotonic()
                while self._late and self._late[0][0] <= now and not self.stalled:
                    _, to, data = self._late.popleft()
                    self._send(to, data)
            if not found:
                time.sleep(0.001)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(self._target, timeout=1)
        except OSError:
            client.close()
            return
        for each, other in ((client, server), (server, client)):
            each.settimeout(5)
            self._pairs[each] = other
        self._inward.add(server)

    def _pass(self, source: socket.socket) -> None:
        try:
            data = source.recv(1 << 18)
        except OSError:
            data = b""
        if not data:
            self._close(source)
        elif source in self._inward and (self.garble or self.delay or self._late):
            data = os.urandom(len(data)) if self.garble else data
            self._late.append((time.monotonic() + self.delay, self._pairs[source], data))
        else:
            self._send(self._pairs[source], data)

    def _send(self, to: socket.socket, data: bytes) -> None:
        if to in self._pairs:
            try:
                to.sendall(data)
            except OSError:
                self._close(to)

    def _close(self, each: socket.socket) -> None:
        other = self._pairs.pop(each, None)
        for end in (each, other):
            if end is not None:
                self._pairs.pop(end, None)
                self._inward.discard(end)
                with contextlib.suppress(OSError):
                    end.close()
