"""Authenticated encryption of each segment of a value.

Encoded form: version u8, cipher u8, key id (8), nonce (12), ciphertext and tag (16). Associated data: the
fields before the nonce, the value's key, and the segment's layer and heads; so a segment that was moved to another
value or place is refused like one that was changed.
"""

from __future__ import annotations

import os
import struct
import threading
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from lmcache_core.spi import BytesSerde, ConfigError, Corrupt, ValueInfo
from lmcache_serde_encrypt.keys import ID_NBYTES, Master, read_keys

VERSION = 1
CIPHERS: dict[str, tuple[int, Any]] = {
    "aes-256-gcm": (1, AESGCM),
    "chacha20-poly1305": (2, ChaCha20Poly1305),
}
_HEAD = struct.Struct(f"<BB{ID_NBYTES}s")
_NONCE, _TAG = 12, 16
OVERHEAD = _HEAD.size + _NONCE + _TAG
_KEPT = 1024  # derived keys


@dataclass(frozen=True, slots=True)
class EncryptOptions:
    """Options of ``encrypt``.

    Attributes:
        key_file: path of the master keys, 64 hexadecimal digits a line; the first encrypts.
        cipher: ``aes-256-gcm`` or ``chacha20-poly1305``.
    """

    key_file: str
    cipher: str = "aes-256-gcm"

    def __post_init__(self) -> None:
        if self.cipher not in CIPHERS:
            raise ConfigError(f"no cipher {self.cipher!r}: {' or '.join(CIPHERS)}")


class Encrypt(BytesSerde):
    """Encrypts, and refuses what somebody else wrote. A key for each key space, hence tenant and model."""

    config_type = EncryptOptions
    wire_id = "encrypt"
    lossless = True
    required = True

    def __init__(self, config: EncryptOptions, /) -> None:
        keys = read_keys(config.key_file)
        self._number = CIPHERS[config.cipher][0]
        self._first = keys[0]
        self._by_id = {key.id: key for key in keys}
        self._ciphers: dict[tuple[bytes, int, bytes], Any] = {}
        self._lock = threading.Lock()

    def bound(self, nbytes: int, /) -> int:
        return nbytes + OVERHEAD

    def encode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> int:
        head = _HEAD.pack(VERSION, self._number, self._first.id)
        nonce = os.urandom(_NONCE)
        begin = _HEAD.size + _NONCE
        into[:begin] = head + nonce
        cipher = self._cipher(self._first, self._number, info.key.space)
        target = into[begin : source.nbytes + OVERHEAD]
        cipher.encrypt_into(nonce, source, _associated(head, info), target)
        return source.nbytes + OVERHEAD

    def decode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> None:
        if source.nbytes != into.nbytes + OVERHEAD:
            raise _refused(info, f"{source.nbytes} bytes")
        version, number, key_id = _HEAD.unpack_from(source)
        master = self._by_id.get(key_id)
        if version != VERSION or number not in (1, 2):
            raise _refused(info, f"version {version}, cipher {number}")
        if master is None:
            raise _refused(info, f"key {key_id.hex()} is not in the key file")
        head, begin = bytes(source[: _HEAD.size]), _HEAD.size + _NONCE
        cipher = self._cipher(master, number, info.key.space)
        try:
            nonce = bytes(source[_HEAD.size : begin])
            cipher.decrypt_into(nonce, source[begin:], _associated(head, info), into)
        except InvalidTag:
            raise _refused(info, "not what was encrypted for this place") from None

    def _cipher(self, master: Master, number: int, space: bytes) -> Any:
        """The cipher of a key space; made once."""
        place = (master.id, number, space)
        found = self._ciphers.get(place)
        if found is None:
            kind = next(kind for each, kind in CIPHERS.values() if each == number)
            found = kind(master.derive(bytes([number]) + space))
            with self._lock:
                if len(self._ciphers) >= _KEPT:
                    self._ciphers.clear()
                self._ciphers[place] = found
        return found


def _associated(head: bytes, info: ValueInfo) -> bytes:
    segment, key = info.spec.segments[0], info.key
    place = struct.pack("<HIHH", key.group, segment.layer, segment.head_begin, segment.head_end)
    return b"".join((head, key.space, key.digest, place))


def _refused(info: ValueInfo, reason: str) -> Corrupt:
    return Corrupt(f"{info.key!r} cannot be decrypted: {reason}", operation="load")
