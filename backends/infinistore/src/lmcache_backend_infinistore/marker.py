"""What is stored under a key: where its value lies, and how long it is.

The server shows a value before it is whole, shows what a writer that died has left, and cannot tell a length. So a value
goes under a name that nobody else uses, and this under the key afterwards: 48 bytes that prove themselves.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

FORM = struct.Struct("<8sQ16s16s")
MAGIC = b"lmcache1"
NBYTES = FORM.size


@dataclass(frozen=True, slots=True)
class Marker:
    """Length of a value, and the number in its name."""

    nbytes: int
    number: bytes

    def value_name(self, name: bytes) -> bytes:
        return name + b"." + self.number.hex().encode()

    def pack(self, name: bytes) -> bytes:
        return FORM.pack(MAGIC, self.nbytes, self.number, _proof(name, self.nbytes, self.number))


def unpack(name: bytes, raw: bytes) -> Marker | None:
    """The marker under a key; None for anything else, such as one that is not yet written."""
    if len(raw) != NBYTES:
        return None
    magic, nbytes, number, proof = FORM.unpack(raw)
    if magic != MAGIC or proof != _proof(name, nbytes, number):
        return None
    return Marker(nbytes, number)


def _proof(name: bytes, nbytes: int, number: bytes) -> bytes:
    text = b"%s %d %s" % (name, nbytes, number)
    return hashlib.sha256(text).digest()[:16]
