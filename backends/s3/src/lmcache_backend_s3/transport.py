"""HTTP/1.1 between sockets and the caller's memory: connections that are kept, and can be cut from outside."""

from __future__ import annotations

import http.client
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from lmcache_backend_s3.proxy import Proxy
from lmcache_core.spi import BackendError, Unavailable

DRAIN = 1 << 16
"""Rest of an answer that is read to keep the connection; for more it is cheaper to make a new one."""
SLICE = 1 << 20
"""Bytes that must move within one timeout."""
TOGETHER = 16 << 10
IDLE_S = 15.0


class Call:
    """What one caller waits for: the sockets at work for it, cut together when nobody waits any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._why = ""

    def attach(self, connection: socket.socket, /) -> None:
        """Put a socket to work.

        Raises:
            Unavailable: the call has been cut.
        """
        with self._lock:
            self.check()
            self._sockets.add(connection)

    def detach(self, connection: socket.socket, /) -> None:
        with self._lock:
            self._sockets.discard(connection)

    def check(self) -> None:
        """Raise ``Unavailable`` once the call has been cut."""
        if self._why:
            raise Unavailable(self._why, retryable=False)

    def cut(self, why: str, /) -> None:
        """Make every thread at work for this call fail at once, and keep others from beginning."""
        with self._lock:
            self._why = self._why or why
            for connection in self._sockets:
                with suppress(OSError):
                    # Past the TLS layer, whose state belongs to the thread that reads.
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)


class Transport:
    """Requests to one server. Thread-safe; every failure of the network is ``Unavailable``.

    Args:
        tls: None for plain HTTP.
        timeout: longest wait without progress.
        idle: most connections kept.
        now: monotonic clock.
        proxy: what stands between; plain requests are handed to it, encrypted ones pass through it.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None,
        timeout: float,
        connect_timeout: float,
        idle: int,
        now: Callable[[], float],
        proxy: Proxy | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self._tls = tls
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._most_idle = idle
        self._now = now
        self._proxy = proxy
        self._handed = proxy if tls is None else None
        self._idle: list[tuple[socket.socket, float]] = []
        self._lock = threading.Lock()
        self._closed = False

    @property
    def authority(self) -> str:
        """What the Host header says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self._tls else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for sock, _ in idle:
            sock.close()

    @contextmanager
    def exchange(
        self,
        call: Call,
        method: str,
        target: str,
        headers: Mapping[str, str],
        parts: Sequence[memoryview] = (),
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request and give its response; the body is read inside, or not at all."""
        sock, response = self._ask(call, method, target, headers, parts)
        keep = False
        try:
            yield response
            length = response.length
            if not response.will_close and length is not None and length <= DRAIN:
                response.read()
                keep = True
        except BackendError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._failed(call, error)
        finally:
            call.detach(sock)
            response.close()
            if keep:
                self._keep(sock)
            else:
                sock.close()

    def _ask(
        self,
        call: Call,
        method: str,
        target: str,
        headers: Mapping[str, str],
        parts: Sequence[memoryview],
    ) -> tuple[socket.socket, http.client.HTTPResponse]:
        kept = self._kept()
        while True:
            sock = kept or self._connect(call)
            try:
                if kept:
                    call.attach(sock)
                self._send(sock, method, target, headers, parts)
                response = _answer(sock, method)
                if response.status == http.HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
                    response.close()
                    self._refused(response)
                return sock, response
            except (OSError, http.client.HTTPException, ValueError) as error:
                call.detach(sock)
                sock.close()
                if isinstance(error, BackendError):
                    raise
                if not kept or not isinstance(error, ConnectionError):
                    self._failed(call, error)
                kept = None  # the server had closed it: every request here may be sent twice

    def _send(
        self,
        sock: socket.socket,
        method: str,
        target: str,
        headers: Mapping[str, str],
        parts: Sequence[memoryview],
    ) -> None:
        if self._handed is not None:
            target, headers = (
                f"http://{self.authority}{target}",
                {**headers, **self._handed.headers},
            )
        lines = [f"{method} {target} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        if any(character in line for line in lines for character in "\r\n"):
            raise ValueError("a header has a line break in it")
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        try:
            for part in filter(len, parts):
                at = 0
                if head:
                    # Head and first bytes leave together: cut between the two, SeaweedFS keeps an empty object.
                    at = min(TOGETHER, part.nbytes)
                    sock.sendall(head + part[:at])
                    head = b""
                for begin in range(at, part.nbytes, SLICE):
                    sock.sendall(part[begin : begin + SLICE])
            if head:
                sock.sendall(head)
        except (BrokenPipeError, ConnectionResetError):
            # A server that refuses may close before it has read everything; its answer may be here.
            if not select.select([sock], [], [], 0)[0]:
                raise

    def _connect(self, call: Call) -> socket.socket:
        call.check()
        problem: OSError | None = None
        first = self._proxy or self
        try:
            found = socket.getaddrinfo(first.host, first.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Unavailable(f"cannot find {first}: {error}") from error
        for family, kind, protocol, _, address in found:
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(self._connect_timeout)
                call.attach(sock)
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls is not None:
                    if self._proxy is not None:
                        self._pass(sock, self._proxy)
                    sock = self._secured(call, self._tls, sock)
                sock.settimeout(self._timeout)
                return sock
            except OSError as error:
                call.detach(sock)
                sock.close()
                if isinstance(error, Unavailable):
                    raise
                problem = error
        call.check()
        raise Unavailable(f"cannot connect to {first}: {problem}")

    def _pass(self, sock: socket.socket, proxy: Proxy) -> None:
        """Let the proxy connect to the server."""
        place = f"{self.authority.removesuffix(f':{self.port}')}:{self.port}"
        lines = [f"CONNECT {place} HTTP/1.1", f"host: {place}"]
        lines += [f"{name}: {text}" for name, text in proxy.headers.items()]
        sock.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        try:
            response = _answer(sock, "CONNECT")
        except (http.client.HTTPException, ValueError) as error:
            raise Unavailable(f"{proxy} does not speak HTTP: {error!r}", retryable=False) from error
        response.close()
        if response.status != http.HTTPStatus.OK:
            self._refused(response)

    def _refused(self, response: http.client.HTTPResponse) -> NoReturn:
        """Say that the proxy does not let requests pass."""
        wants = response.status == http.HTTPStatus.PROXY_AUTHENTICATION_REQUIRED
        raise Unavailable(
            f"{self._proxy} lets nobody through to {self}: {response.status} {response.reason}"
            + ("; set proxy_auth" if wants else ""),
            retryable=response.status >= http.HTTPStatus.INTERNAL_SERVER_ERROR,
        )

    def _secured(self, call: Call, tls: ssl.SSLContext, plain: socket.socket) -> ssl.SSLSocket:
        call.detach(plain)
        sock = tls.wrap_socket(plain, server_hostname=self.host, do_handshake_on_connect=False)
        try:
            call.attach(sock)
            sock.do_handshake()
        except OSError:
            call.detach(sock)
            sock.close()
            raise
        return sock

    def _kept(self) -> socket.socket | None:
        """A connection that is open as far as can be told."""
        oldest = self._now() - IDLE_S
        while True:
            with self._lock:
                if not self._idle:
                    return None
                sock, since = self._idle.pop()
            poll = select.poll()
            poll.register(sock, select.POLLIN)
            if since >= oldest and not poll.poll(0):
                return sock
            sock.close()

    def _keep(self, sock: socket.socket) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < self._most_idle:
                self._idle.append((sock, self._now()))
                return
        sock.close()

    def _failed(self, call: Call, error: Exception) -> NoReturn:
        call.check()
        text = "no answer in time" if isinstance(error, TimeoutError) else str(error) or repr(error)
        raise Unavailable(f"{self}: {text}") from error


def _answer(sock: socket.socket, method: str) -> http.client.HTTPResponse:
    """The head of an answer; its body is still to be read."""
    response = http.client.HTTPResponse(sock, method=method)
    try:
        response.begin()
    except BaseException:  # whatever it is: an open file of a socket keeps it open
        response.close()
        raise
    return response


def read_into(response: http.client.HTTPResponse, views: Sequence[memoryview]) -> int:
    """Fill ``views`` from the body and return their length.

    Raises:
        Unavailable: the connection ended before.
    """
    total = 0
    for view in views:
        done = 0
        while done < view.nbytes:
            got = response.readinto(view[done:])
            if not got:
                raise Unavailable(f"the answer ended after {total + done} bytes")
            done += got
        total += done
    return total
