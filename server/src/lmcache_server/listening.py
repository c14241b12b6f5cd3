"""Where clients come in: the unix socket, its lock, and TCP."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from lmcache_core.spi import ConfigError
from lmcache_server.connection import Connection

if TYPE_CHECKING:
    from lmcache_server.daemon import Daemon

_BACKLOG = 256
_MOST_CONNECTIONS = 1024
_REST_S = 0.1
"""Seconds until clients are taken again where there was no descriptor for one."""


class Listener:
    """A listening socket on the daemon's loop; it owns the socket."""

    def __init__(self, daemon: Daemon, sock: socket.socket) -> None:
        self._daemon = daemon
        self._socket = sock
        self._local = sock.family == socket.AF_UNIX
        sock.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        if self._socket.fileno() >= 0:
            self._daemon.loop.add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        daemon = self._daemon
        try:
            sock, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as error:  # who asks stays in the queue: asked again at once, it is so again
            daemon.refuse("everybody", f"no further connection: {error.strerror}")
            daemon.loop.remove_reader(self._socket.fileno())
            daemon.loop.call_later(_REST_S, self._listen)
            return
        # Half are for this user's processes: nobody outside keeps them from their cache.
        most = _MOST_CONNECTIONS if self._local else _MOST_CONNECTIONS // 2
        if len(daemon.connections) >= most:
            daemon.refuse("everybody", f"{most} connections are open")
            sock.close()
            return
        try:
            Connection(daemon, sock, local=self._local)
        except OSError:  # it was reset before it was accepted
            sock.close()

    def close(self) -> None:
        """Take nobody any more."""
        self._daemon.loop.remove_reader(self._socket.fileno())
        self._socket.close()


def claim(path: str, /) -> int:
    """Own a socket's path for as long as this process lives; returns what keeps it.

    Raises:
        ConfigError: another daemon owns it, something that is no socket is in the way, or none can be there.
    """
    while True:
        try:
            lock = os.open(f"{path}.lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"no socket at {path}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise ConfigError(
                f"another daemon serves {path}; stop it or choose another --socket"
            ) from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(f"{path}.lock")):
                break
        os.close(lock)  # of a daemon that has disclaimed it meanwhile
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            os.close(lock)
            raise ConfigError(f"{path} is in the way: it is no socket")
    return lock


def disclaim(path: str, lock: int, /) -> None:
    """Undo ``claim``. The file goes while it is locked, so that nobody locks what has no name."""
    with suppress(OSError):
        os.unlink(f"{path}.lock")
    os.close(lock)


def listen(
    path: str, host: str, port: int, passed: Sequence[socket.socket], /
) -> list[socket.socket]:
    """Listen where clients look: on a unix socket, and on TCP unless the port is 0.

    Args:
        passed: sockets to be used in place of those of their family.

    Raises:
        ConfigError: not possible there.
    """
    for sock in passed:
        sock.listen(
            _BACKLOG
        )  # anew: from now on it is this user who answers, as clients want to see
    local = [sock for sock in passed if sock.family == socket.AF_UNIX]
    tcp = [sock for sock in passed if sock.family != socket.AF_UNIX]
    if not tcp and port:
        tcp = _listen_tcp(host, port)
    return [*tcp, *(local or [_listen_unix(path)])]


def _listen_unix(path: str) -> socket.socket:
    """A socket that only this user can reach."""
    listener = socket.socket(socket.AF_UNIX)
    umask = os.umask(0o177)
    try:
        with suppress(FileNotFoundError):
            os.unlink(path)
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ConfigError(f"no socket at {path}: {error.strerror or error}") from error
    finally:
        os.umask(umask)
    listener.listen(_BACKLOG)
    return listener


def _listen_tcp(host: str, port: int) -> list[socket.socket]:
    """One socket for every address of a host."""
    found: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            listener = socket.socket(family, kind, protocol)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            found.append(listener)
            listener.bind(address)
            listener.listen(_BACKLOG)
    except OSError as error:
        for listener in found:
            listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return found
