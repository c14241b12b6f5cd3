"""The file of tables that ``lmcache calibrate`` writes and both codecs read.

``LMTABLES``, the length of a description u32, the description (JSON: what was calibrated, and name, type and shape
of each array), the arrays one after the other, little-endian, and a SHA-256 over all before it. The digest
names the tables: a different byte is different tables.

Arrays of a codec (L layers, P planes, H heads, D elements, G levels, K kinds of token):

* ``mean`` f4 [L,P,H,D]; ``steps`` f4 [G,L,P,H,D]; ``classes`` u1 [G,L,K,P,H,D]; ``freqs`` u2 [G,C,256], rows
  summing to 4096 over symbols 127 +- limit and 255, the escape;
* of ``klt``: ``forward``, ``backward`` f2 [L,P,H,D,D] times ``forward_scale``, ``backward_scale`` f4 [L,P,H];
* of ``cachegen``: ``deltas`` u1 [G,L,P,H,D]; for both: ``rope.N`` f8 [pairs], and which one a layer turns by in
  the description.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from lmcache_core.spi import ConfigError

Array = NDArray[Any]
MAGIC = b"LMTABLES"
FORMAT = 1
BITS = 12
"""Width of the probabilities."""
TYPES = ("<f8", "<f4", "<f2", "<u2", "|u1")
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables of one model.

    Attributes:
        digest: of the file, in hexadecimal.
        about: model, layers, heads, dim, planes, rope, codecs (group, rounding, bits of each level).
        arrays: by ``CODEC.NAME``.
    """

    digest: str
    about: Mapping[str, Any]
    arrays: Mapping[str, Array]


class TablesFile:
    """A path in a configuration; as text it is the digest of what lies there, which is what values depend on.

    Attributes:
        path: empty when none was named.
        digest: hexadecimal, 64 digits; empty when none was named.
    """

    __slots__ = ("digest", "path")

    def __init__(self, path: str = "", digest: str = "") -> None:
        self.path, self.digest = path, digest

    @classmethod
    def parse(cls, written: object, /) -> Self:
        """Look the digest up.

        Raises:
            ConfigError: no such file, or another one, or a damaged one.
        """
        if not isinstance(written, str) or not written:
            raise ConfigError(f"tables: expected the path of a file, not {written!r}")
        return cls(written, read(written).digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TablesFile) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        return self.digest[:32]

    __repr__ = __str__


def read(path: str, /) -> Tables:
    """Tables of a file.

    Raises:
        ConfigError: no such file, or another one, or a damaged one.
    """
    try:
        status = Path(path).stat()
        return _read(path, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise ConfigError(
            f"tables {path!r} cannot be read ({error.strerror}); lmcache calibrate MODEL makes them"
        ) from error


@lru_cache(8)
def _read(path: str, _changed: int, _size: int) -> Tables:
    """Remembered by its time and length, as a configuration and its serdes read the same file."""
    data = Path(path).read_bytes()
    body, digest = data[:-32], data[-32:]
    if not data.startswith(MAGIC) or len(data) < len(MAGIC) + _LENGTH.size + 32:
        raise ConfigError(f"tables {path!r} are no tables; lmcache calibrate MODEL makes them")
    if hashlib.sha256(body).digest() != digest:
        raise ConfigError(
            f"tables {path!r} are damaged (digest differs); calibrate again or copy them again"
        )
    at = len(MAGIC) + _LENGTH.size
    (length,) = _LENGTH.unpack_from(body, len(MAGIC))
    about = json.loads(body[at : at + length])
    if about["format"] != FORMAT:
        raise ConfigError(
            f"tables {path!r} have format {about['format']}, this reads {FORMAT}; calibrate again"
        )
    at += length
    arrays = {}
    for name, kind, shape in about["arrays"]:
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(body, kind, count, at).reshape(shape)
        at += arrays[name].nbytes
    return Tables(digest.hex(), about, arrays)


def written(about: Mapping[str, Any], arrays: Mapping[str, Array], /) -> bytes:
    """The bytes of a file of tables."""
    listed = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    assert all(kind in TYPES for _, kind, _ in listed)
    text = json.dumps({"format": FORMAT, **about, "arrays": listed}, sort_keys=True).encode()
    text += b" " * (
        -(len(MAGIC) + _LENGTH.size + len(text)) % 8
    )  # arrays lie where processors like them
    parts = [MAGIC, _LENGTH.pack(len(text)), text]
    parts += [array.tobytes() for array in arrays.values()]
    body = b"".join(parts)
    return body + hashlib.sha256(body).digest()
