"""What a rail is: one place, reached through one NIXL plugin, that keeps parts of values by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from socket import socket
from typing import Any

from lmcache_backend_nixl.agent import Agent, Piece, Place
from lmcache_backend_nixl.driver import Operation, Together
from lmcache_core.spi import (
    BufferTooSmall,
    Corrupt,
    Executor,
    Load,
    Region,
    Stored,
    StoreStatus,
    Unavailable,
)


@dataclass(slots=True, eq=False)
class Transfer:
    """One NIXL transfer as a step of an operation. Memory that is not registered is, for its time."""

    agent: Agent
    verb: str
    pieces: Sequence[Piece]
    kind: str
    places: Sequence[Place]
    peer: str = ""
    result: Any = None
    _handle: Any = field(default=None)

    def begin(self, executor: Executor, /) -> None:
        self.agent.lend(self.pieces)
        try:
            self._handle = self.agent.post(
                self.verb, self.pieces, self.kind, self.places, self.peer
            )
        except Unavailable:
            self.agent.take_back(self.pieces)
            raise

    def ended(self) -> bool:
        try:
            if not self.agent.ended(self._handle):
                return False
        except Unavailable:
            self.agent.take_back(self.pieces)
            raise
        self.agent.take_back(self.pieces)
        return True


class Rail(ABC):
    """One place. Operations run on the driver's thread, everything else blocks, on any thread."""

    listing = False
    """Whether ``names`` works."""
    register = False
    """Whether transfers gain from ``add``."""
    most: int | None = None
    """Longest part."""

    @abstractmethod
    def open(self) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Idempotent; nothing runs any more."""

    @abstractmethod
    def lengths(self, names: Sequence[str], /) -> list[int | None]:
        """Of those parts that are there."""

    @abstractmethod
    def delete(self, names: Sequence[str], /) -> list[bool]:
        """Which were there."""

    @abstractmethod
    def load(self, name: str, load: Load, /) -> Operation:
        """Fill the views of ``load``; ends with ``Loaded``."""

    @abstractmethod
    def store(
        self, name: str, views: Sequence[memoryview], /, *, first: bool, others: Together | None
    ) -> Operation:
        """Write a part; ends with ``Stored``.

        Args:
            first: it makes the value visible, and never takes the place of another; other parts may.
            others: parts to wait for before this one becomes visible.
        """

    def flush(self) -> bool:
        """Send what operations have collected; whether there was anything."""
        return False

    @property
    def socket(self) -> socket | None:
        """Where answers come that operations wait for."""
        return None

    def add(self, region: Region, /) -> bool:
        """Register memory for good."""
        return False

    def remove(self, region: Region, /) -> None:
        """Undo ``add``."""

    def hurry(self) -> None:
        """Somebody wants his memory back; called from the event loop, again and again."""


def wanted(load: Load, nbytes: int, /) -> int:
    """How many bytes of a value of this length a load asks for.

    Raises:
        Corrupt: the value is shorter than that.
        BufferTooSmall: the buffers are.
    """
    length = nbytes - load.offset if load.length is None else load.length
    if not 0 <= load.offset <= load.offset + length <= nbytes:
        asked = f"{length} at {load.offset}"
        raise Corrupt(f"{load.key!r} has {nbytes} bytes, asked for {asked}", operation="load")
    if length > load.room:
        problem = f"{load.key!r} needs {length} bytes, the buffers have {load.room}"
        raise BufferTooSmall(problem, operation="load")
    return length


def all_stored(results: Sequence[Any], /) -> Stored | None:
    """None when every part has been stored, else the result of one that was not."""
    for result in results:
        if result.status not in (StoreStatus.STORED, StoreStatus.PRESENT):
            stored: Stored = result
            return stored
    return None
