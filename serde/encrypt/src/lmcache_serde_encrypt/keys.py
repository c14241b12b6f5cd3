"""Master keys from a file, and what is derived from them."""

from __future__ import annotations

import os
import stat

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from lmcache_core.spi import ConfigError

KEY_NBYTES = 32
ID_NBYTES = 8


class Master:
    """One line of a key file; never prints itself."""

    __slots__ = ("_secret", "id")

    def __init__(self, secret: bytes, /) -> None:
        self._secret = secret
        self.id = self.derive(b"id", ID_NBYTES)
        """Says which key a value needs, and nothing about the key."""

    def derive(self, info: bytes, length: int = KEY_NBYTES, /) -> bytes:
        """HKDF-SHA256 (RFC 5869) of the master key, bound to ``info``."""
        kdf = HKDF(SHA256(), length, salt=None, info=b"lmcache.encrypt\0" + info)
        return kdf.derive(self._secret)


def read_keys(path: str, /) -> list[Master]:
    """The keys of a file, first line first.

    Raises:
        ConfigError: it cannot be read, others may read it, or a line is no key. No line is ever quoted.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"key file {path}: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(f"key file {path} is open to others: chmod 600 {path}")
        if status.st_uid not in (0, os.geteuid()):
            raise ConfigError(f"key file {path} belongs to another user: {status.st_uid}")
        lines = file.read(1 << 16).decode("ascii", "replace").splitlines()
    keys = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                secret = bytes.fromhex(line)
            except ValueError:
                secret = b""
            if len(secret) != KEY_NBYTES:
                raise ConfigError(f"key file {path}: line {number} is not 64 hexadecimal digits")
            keys.append(Master(secret))
    if not keys:
        raise ConfigError(f"key file {path} holds no key: openssl rand -hex 32 > {path}")
    return keys
