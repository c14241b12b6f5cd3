"""How payloads leave and enter an engine's paged memory. Provisional until two connectors pass their kit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lmcache_core.spi.api import PLUGIN_API
from lmcache_core.spi.layout import PageSpec


@dataclass(frozen=True, slots=True)
class Copied:
    """What a finished copy tells.

    Attributes:
        digests: 16 bytes per segment (run of planes of one layer), when a seed was given to ``pack``.
        bad_segment: first segment whose digest did not match in ``unpack``, or -1.
    """

    digests: bytes | None = None
    bad_segment: int = -1


class Fence(ABC):
    """The end of one copy. Until it is reached, both sides of the copy belong to the copy."""

    @abstractmethod
    def done(self) -> bool:
        """Tell without waiting."""

    @abstractmethod
    def wait(self, timeout: float | None = None, /) -> Copied | None:
        """Wait for the end; None when the timeout passed first.

        Raises:
            RuntimeError: the device reported a failure; the target holds undefined bytes.
        """


class GPUConnector(ABC):
    """Copies between paged engine memory and contiguous host memory.

    ``bind`` once, then ``pack`` and ``unpack`` any number of times. Payload order is the order of the
    bound specs: ``[token][head][cell]`` per plane for ``Interior.ROWS``, whole blocks otherwise.
    """

    plugin_api: ClassVar[int] = PLUGIN_API

    @classmethod
    def unavailable(cls) -> str | None:
        """Tell why this connector cannot work here, or None."""
        return None

    @abstractmethod
    def bind(self, tensors: Mapping[str, Any], specs: Sequence[PageSpec], /) -> None:
        """Remember the engine's memory; the tensors are kept alive as long as the connector is."""

    @abstractmethod
    def pack(
        self,
        group: int,
        blocks: Sequence[int],
        first: int,
        count: int,
        into: memoryview,
        /,
        *,
        seed: int | None = None,
        layers: Sequence[int] | None = None,
        stream: Any = None,
    ) -> Fence:
        """Copy tokens ``[first, first + count)`` of the sequence formed by ``blocks`` into ``into``.

        Args:
            seed: digest each segment in the same pass.
            layers: only these layers, for per-layer streaming; None for all.

        Raises:
            ValueError: block out of range, wrong buffer length, or a part of a block of an opaque group;
                nothing was touched.
        """

    @abstractmethod
    def unpack(
        self,
        group: int,
        blocks: Sequence[int],
        first: int,
        count: int,
        source: memoryview,
        /,
        *,
        seed: int | None = None,
        digests: bytes | None = None,
        layers: Sequence[int] | None = None,
        stream: Any = None,
    ) -> Fence:
        """Inverse of ``pack``; with ``seed`` and ``digests`` each segment is verified in the same pass."""

    @abstractmethod
    def close(self) -> None:
        """Wait for copies in flight and let the tensors go; idempotent."""
