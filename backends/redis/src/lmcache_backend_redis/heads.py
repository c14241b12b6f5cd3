"""What stands in the place of a value whose bytes lie in several strings: where they are, in a fixed number of bytes."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Self

_FORM = struct.Struct(">8s16sQQ")
_SUM = struct.Struct(">I")
_MAGIC = b"LMparts1"
HEAD_NBYTES = _FORM.size + _SUM.size
MOST_PARTS = 1 << 16
"""Nobody writes more: what a forged head makes a reader do has an end."""
MARK = b"#"
"""Between a value's name and the rest of a part's; no value's own name has it behind the prefix."""


@dataclass(frozen=True, slots=True)
class Head:
    """Names the parts of one value, written by one writer, once.

    Attributes:
        tag: 16 random bytes of this writing, in the name of every part.
        part_nbytes: length of every part but the last.
        nbytes: length of the value, at least 1.
    """

    tag: bytes
    part_nbytes: int
    nbytes: int

    @property
    def encoded(self) -> bytes:
        text = _FORM.pack(_MAGIC, self.tag, self.part_nbytes, self.nbytes)
        return text + _SUM.pack(zlib.crc32(text))

    @classmethod
    def read(cls, said: object, /) -> Self | None:
        """Read what a server gave; None for anything but a whole head."""
        if not isinstance(said, bytes) or len(said) != HEAD_NBYTES:
            return None
        magic, tag, part_nbytes, nbytes = _FORM.unpack_from(said)
        head = cls(tag, part_nbytes, nbytes)
        good = magic == _MAGIC and 0 < nbytes <= part_nbytes * MOST_PARTS and head.encoded == said
        return head if good else None

    @property
    def lengths(self) -> list[int]:
        """Bytes of every part."""
        starts = range(0, self.nbytes, self.part_nbytes)
        return [min(self.part_nbytes, self.nbytes - start) for start in starts]

    def names(self, name: bytes, /) -> list[bytes]:
        """Names of the parts of the value ``name``; no other value's, wherever the head was copied from."""
        tag = self.tag.hex().encode()
        return [b"%s%s%s.%d" % (name, MARK, tag, number) for number in range(len(self.lengths))]
