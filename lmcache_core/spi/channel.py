"""Direct transfers between the memory of two nodes. Provisional until two channels pass their kit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from lmcache_core.spi.api import PLUGIN_API
from lmcache_core.spi.buffers import Region
from lmcache_core.spi.context import Context


@dataclass(frozen=True, slots=True)
class Piece:
    """One run of bytes: ``[offset, offset + nbytes)`` of a registered region."""

    region: int
    offset: int
    nbytes: int


class TransferState(Enum):
    """Where a posted transfer is."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class TransferChannel(ABC):
    """Four steps: prepare, post, check, release; none of them blocks."""

    plugin_api: ClassVar[int] = PLUGIN_API
    config_type: ClassVar[type]

    @abstractmethod
    def __init__(self, config: Any, context: Context, /) -> None: ...

    @abstractmethod
    def register(self, region: Region, /) -> int:
        """Make a region reachable; the number names it in pieces."""

    @abstractmethod
    def describe(self) -> bytes:
        """What a peer needs to reach this side's regions; opaque, versioned by the channel."""

    @abstractmethod
    def connect(self, description: bytes, /) -> object:
        """Make a peer of its description.

        Raises:
            Unavailable: the peer cannot be reached from here.
        """

    @abstractmethod
    def prepare(self, peer: object, local: Sequence[Piece], remote: Sequence[Piece], /) -> object:
        """Pair pieces of equal lengths; nothing moves yet."""

    @abstractmethod
    def post(self, transfer: object, /, *, write: bool) -> None:
        """Start: read the remote pieces into the local ones, or write them."""

    @abstractmethod
    def check(self, transfer: object, /) -> TransferState:
        """Tell the state. Memory is quiescent unless RUNNING."""

    @abstractmethod
    def release(self, transfer: object, /) -> bool:
        """End a transfer early or forget an ended one; False while memory may still be touched."""

    @abstractmethod
    def close(self) -> None:
        """Tear all connections down; afterwards no peer can touch this side's memory."""
