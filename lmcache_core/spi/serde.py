"""How values are encoded outside memory: pure, synchronous, thread-safe, no I/O."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from lmcache_core.spi.api import PLUGIN_API
from lmcache_core.spi.keys import Key
from lmcache_core.spi.layout import KVSpec


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """What a serde may know about what it encodes: one segment (layer and head range) of a value.

    Attributes:
        key: address of the value (associated data for encryption).
        spec: stored form of the unencoded payload, with exactly one segment. A ``ROWS`` segment is
            ``[plane][token][head][dim]``.
        first_token: position of the chunk's first token in its prefix, -1 when the writer did not know;
            equal in ``encode`` and ``decode``.
    """

    key: Key
    spec: KVSpec
    first_token: int = -1


class _Serde(ABC):
    """What both kinds share. Every segment of a value is encoded by itself, so that it can be read by itself.

    Attributes:
        wire_id: stable name written into the frame, such as ``"x12"``; at most 15 ASCII characters.
            A change of the encoding is a new wire id. Options that decoding depends on are written into
            the encoded bytes: any instance decodes what any other encoded.
        lossless: decode(encode(x)) == x for every bit pattern. A lossy serde is offered ``ROWS`` groups of
            16 and 32-bit floats only.
        error_bound: for a lossy serde, a one-line statement of its bound, for people.
        exact_tokens: for a lossy serde: where a prompt begins (and where nobody knows) the rows of so many
            tokens are also kept as they are and put back after ``decode``. Done around it, not by it.
        drops_tokens: rows of some tokens come back as zeros, keys and values, and the engine leaves them out. The
            name of such a serde begins with ``drop``, which engines that cannot do that refuse by.
        required: never leave it out (encryption): what it declines is not stored, and what was stored
            without it is not read.
    """

    plugin_api: ClassVar[int] = PLUGIN_API
    config_type: ClassVar[type]
    wire_id: ClassVar[str]
    lossless: ClassVar[bool]
    error_bound: ClassVar[str] = ""
    drops_tokens: ClassVar[bool] = False
    required: ClassVar[bool] = False
    exact_tokens: int = 4

    @abstractmethod
    def __init__(self, config: Any, /) -> None: ...

    @abstractmethod
    def encode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> int:
        """Write the encoded form and return its length.

        Behaviour: deterministic unless the serde says otherwise. Declines by raising ``ValueError``
        (non-finite input of a lossy codec, wrong dtype); the whole value is then stored without this serde.
        Buffers: ``into`` has at least ``bound`` bytes; bytes after the returned length are undefined.
        """

    @abstractmethod
    def decode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> None:
        """Rebuild exactly ``into.nbytes`` bytes.

        Raises:
            Corrupt: the encoded bytes are damaged or foreign. Never crashes, never reads outside ``source``.
        """


class TensorSerde(_Serde):
    """First of a chain: understands the elements of a segment (``info.spec``)."""

    @abstractmethod
    def bound(self, spec: KVSpec, /) -> int:
        """Most bytes ``encode`` can produce for a segment of this form."""


class BytesSerde(_Serde):
    """Later in a chain: understands bytes only (compression, encryption)."""

    @abstractmethod
    def bound(self, nbytes: int, /) -> int:
        """Most bytes ``encode`` can produce for an input of this length."""
