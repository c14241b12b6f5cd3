"""Names of stored values. Only ``lmcache_core.identity`` makes them; everybody else passes them on."""

from __future__ import annotations

from typing import NamedTuple

DIGEST_NBYTES = 32
TEXT_LENGTH = 132
"""Length of ``Key.text``: 64 + 4 + 64 characters."""


class Key(NamedTuple):
    """Address of one write-once value: one chunk of one layout group, with all its shards.

    Equal keys denote interchangeable bytes, for ever, in every process and on every node.

    Attributes:
        space: 32 bytes, digest of the key space (model, layout, precision, tenant ...).
        digest: 32 bytes, digest of the whole token prefix up to the end of the chunk.
        group: index of the layout group inside the key space, 0..65535.
    """

    space: bytes
    digest: bytes
    group: int = 0

    @property
    def text(self) -> str:
        """Lower-case hexadecimal form, ``TEXT_LENGTH`` characters: safe in file, object and Redis names."""
        return f"{self.space.hex()}{self.group:04x}{self.digest.hex()}"

    @classmethod
    def parse(cls, text: str, /) -> Key:
        """Inverse of ``text``.

        Raises:
            ValueError: not a key written by ``text`` (length, case or alphabet).
        """
        if len(text) != TEXT_LENGTH or text.strip("0123456789abcdef"):
            raise ValueError(f"not a key: {text[:80]!r} (expected {TEXT_LENGTH} lower-case hex digits)")
        return cls(bytes.fromhex(text[:64]), bytes.fromhex(text[68:]), int(text[64:68], 16))

    def __repr__(self) -> str:
        return f"Key({self.space.hex()[:8]}/{self.group}/{self.digest.hex()[:12]})"
