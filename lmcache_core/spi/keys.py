"""Names of stored values. Only ``lmcache_core.identity`` makes them; everybody else passes them on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from lmcache_core.spi.api import PLUGIN_API

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
            raise ValueError(
                f"not a key: {text[:80]!r} (expected {TEXT_LENGTH} lower-case hex digits)"
            )
        return cls(bytes.fromhex(text[:64]), bytes.fromhex(text[68:]), int(text[64:68], 16))

    def __repr__(self) -> str:
        return f"Key({self.space.hex()[:8]}/{self.group}/{self.digest.hex()[:12]})"


class KeyManager(ABC):
    """Adds identity fields of its own, such as a prompt-template version or a data-residency label.

    Found in the entry-point group ``lmcache_core.key_managers``. It can separate what would be equal;
    it can never make two different token sequences equal.
    """

    plugin_api: ClassVar[int] = PLUGIN_API
    config_type: ClassVar[type]

    @abstractmethod
    def __init__(self, config: Any, /) -> None: ...

    @abstractmethod
    def fields(self, labels: Mapping[str, str], /) -> Mapping[str, bytes]:
        """Return tagged fields for the key space of a request that carries these labels. Pure."""
