"""TLS under the few calls of a socket that this protocol makes; imported only where an address asks for it."""

from __future__ import annotations

import errno
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lmcache_core.spi.errors import ConfigError

_TIMEVAL = struct.Struct("@qq")
_ALERT = b"\x15\x03\x03\x00\x02\x02\x46"
"""The record that says: wrong version of the protocol, and that is the end."""
_BUSY = BlockingIOError(errno.EAGAIN, "not now")


class Tls:
    """A connection over TLS. Timeouts are set as on a plain socket and hold for one call each.

    Every method raises what that of a plain socket does; ``EPROTO`` stands for a peer that breaks TLS.
    """

    __slots__ = ("_limits", "_sock", "close", "fileno", "pending")

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self._limits: dict[int, float | None] = {
            socket.SO_RCVTIMEO: sock.gettimeout(), socket.SO_SNDTIMEO: sock.gettimeout(),
        }  # fmt: skip
        self.pending = sock.pending
        """Bytes that are here already: no look at the descriptor tells of them."""
        self.fileno, self.close = sock.fileno, sock.close

    def setblocking(self, on: bool) -> None:
        self._limits = dict.fromkeys(self._limits, None if on else 0.0)

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        if level == socket.SOL_SOCKET and option in self._limits:
            seconds, micros = _TIMEVAL.unpack(value)
            self._limits[option] = seconds + micros / 1e6
        else:
            self._sock.setsockopt(level, option, value)

    def recv_into(self, view: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        seconds = 0.0 if flags & socket.MSG_DONTWAIT else self._limits[socket.SO_RCVTIMEO]
        got: int = self._try(seconds, self._sock.recv_into, view, nbytes or None)
        return got

    def refuse(self) -> None:
        """Tell a peer that speaks no TLS, which OpenSSL does not; take what has come, or it hears of a reset only."""
        self._sock.settimeout(0.0)
        with suppress(OSError):
            while socket.socket.recv(self._sock, 1 << 16):
                pass
        with suppress(OSError):
            socket.socket.send(self._sock, _ALERT)

    def send(self, data: memoryview) -> int:
        sent: int = self._try(self._limits[socket.SO_SNDTIMEO], self._sock.send, data)
        return sent

    def sendall(self, data: memoryview) -> None:
        self._try(self._limits[socket.SO_SNDTIMEO], self._sock.sendall, data)

    def _try(self, seconds: float | None, work: Callable[..., Any], *args: Any) -> Any:
        self._sock.settimeout(seconds)
        try:
            return work(*args)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, TimeoutError):
            raise _BUSY from None
        except ssl.SSLZeroReturnError:
            return 0
        except ssl.SSLError as error:
            raise OSError(errno.EPROTO, f"TLS: {_reason(error)}") from error


def connect(sock: socket.socket, host: str, ca: str, /) -> Tls:
    """Shake hands with the daemon at ``host`` and check its certificate, within the timeout of ``sock``.

    Args:
        ca: file with the certificates to trust (PEM), or ``""`` for those of the system.

    Raises:
        ConfigError: no certificates can be read there.
        OSError: it speaks no TLS, or is not to be trusted.
    """
    try:
        context = ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        raise ConfigError(f"no certificates can be read from {ca}: {_reason(error)}") from error
    try:
        return Tls(context.wrap_socket(sock, server_hostname=host))
    except ssl.SSLCertVerificationError as error:
        what = f"its certificate is not to be trusted: {error.verify_message}"
        raise OSError(errno.EPROTO, what) from error
    except (ssl.SSLError, ConnectionError) as error:
        raise OSError(errno.EPROTO, f"it speaks no TLS ({_reason(error)})") from error


def serve(certificate: str, key: str, /) -> ssl.SSLContext:
    """What the daemon shakes hands with.

    Raises:
        ConfigError: no certificate or key can be read there, or they do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    load(context, certificate, key)
    return context


def load(context: ssl.SSLContext, certificate: str, key: str, /) -> None:
    """Take a certificate, also instead of the one before.

    Raises:
        ConfigError: as ``serve``.
    """
    try:
        context.load_cert_chain(certificate, key or None)
    except OSError as error:
        files = f"{certificate} and {key}" if key else certificate
        raise ConfigError(f"no certificate with its key in {files}: {_reason(error)}") from error


def accept(context: ssl.SSLContext, sock: socket.socket, /) -> Tls:
    """The daemon's end; hands are shaken with the first bytes that are read."""
    return Tls(context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False))


def _reason(error: OSError) -> str:
    reason = getattr(error, "reason", None)
    return reason.lower().replace("_", " ") if reason else error.strerror or str(error)
