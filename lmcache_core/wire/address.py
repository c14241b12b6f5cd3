"""Where a daemon is reached: folders only its user can enter, and addresses as users write them."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

from lmcache_core.spi.errors import ConfigError

LONGEST_PATH = 100
"""The kernel ends a socket's path at 107 bytes."""
DEFAULT_PORT = 5555


@dataclass(frozen=True, slots=True)
class Address:
    """Either ``path`` of a unix socket, or ``host`` and ``port``; ``ca`` is for ``tls``."""

    path: str = ""
    host: str = ""
    port: int = 0
    tls: bool = False
    ca: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        return f"{'tls' if self.tls else 'tcp'}://{self.host}:{self.port}"


def parse(text: str, /) -> Address:
    """Read ``HOST[:PORT]``, ``tcp://HOST[:PORT]``, ``lmcache://...``, ``unix:///PATH`` or a path.

    ``tls://HOST[:PORT][?ca=FILE]`` is TCP under TLS; without a file the system's certificates are trusted.

    Raises:
        ConfigError: none of these.
    """
    if text.startswith("unix://") or text.startswith("/"):
        return Address(path=text.removeprefix("unix://"))
    rest, _, ca = text.partition("?ca=")
    tls = rest.startswith("tls://")
    rest = rest.removeprefix("tls://")
    for scheme in ("tcp://", "lmcache://", "lm://"):
        rest = rest.removeprefix(scheme)
    rest = rest.rstrip("/")
    host, colon, port = rest.rpartition(":")
    if not colon or rest.endswith("]"):
        host, port = rest, str(DEFAULT_PORT)
    host = host.strip("[]")
    if (
        not host
        or "/" in host
        or (ca and not tls)
        or not port.isdigit()
        or not 0 < int(port) < 65536
    ):
        raise ConfigError(
            f"not an address of a daemon: {text!r} (examples: localhost:5555, unix:///run/kv.sock)"
        )
    return Address(host=host, port=int(port), tls=tls, ca=ca)


def runtime_folder(env: Mapping[str, str] = os.environ, /) -> str:
    """This user's folder for sockets and locks, made 0700 when it is not there.

    Raises:
        ConfigError: it belongs to somebody else, or others can enter it.
    """
    named = env.get("LMCACHE_RUNTIME_DIR")
    base = env.get("XDG_RUNTIME_DIR")
    if named is None and base and os.path.isdir(base) and os.access(base, os.W_OK):
        named = os.path.join(base, "lmcache")
    return private_folder(named or short_folder())


def short_folder() -> str:
    """A folder whose path is short enough for any socket."""
    base = tempfile.gettempdir()
    return os.path.join(base if len(base) < 40 else "/tmp", f"lmcache-{os.getuid()}")


def private_folder(path: str, /) -> str:
    """Make a folder that only this user can enter, or see that it is one."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{path} is no folder of this user alone (0700); remove it or set LMCACHE_RUNTIME_DIR"
        )
    return path


def socket_path(folder: str, name: str, /) -> str:
    """Where the socket ``name`` of a folder is; both sides fall back to the same short path."""
    path = os.path.join(folder, f"{name}.sock")
    if len(os.fsencode(path)) <= LONGEST_PATH:
        return path
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
    return os.path.join(private_folder(short_folder()), f"{digest}.sock")
