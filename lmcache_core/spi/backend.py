"""Where values live: the one contract every storage backend fulfils.

Laws (each is a test of ``lmcache_core.testing.backend.BackendTests``):

* B1 Alignment. A result sequence has the length and order of its request. Empty in, empty out.
* B2 Miss. Absent is a value (``None``, ``MISSED``), not an error; it is not logged and allocates nothing.
* B3 Partial fault. A per-item failure is a result carrying an error; a raised error means no item has a result.
* B4 Borrowing. Views belong to the caller, borrowed for the await; afterwards no reference to them is kept.
* B5 Quiescence. The await does not end, by return, error or cancellation, while anything may still touch
  borrowed memory; after cancellation it ends within ``Capabilities.quiescence_s``.
* B6 Whole values, written once. A value is visible whole or not at all: after a crash, and to other
  processes; a key that is there keeps its bytes.
* B7 Exact length. ``load`` writes exactly the bytes asked for and leaves the rest of the buffers alone;
  buffers shorter than that are ``BufferTooSmall``, a part that ends after the value is ``Corrupt`` (the value
  is shorter than its reader knows it to be), and in both cases the buffers are untouched.
* B8 Acknowledgement. ``STORED`` is said at the durability named by the capability, not earlier.
* B9 Delete is idempotent and counts what was there.
* B10 Close is idempotent, closes even when it raises, waits for borrowed memory; afterwards every verb
  raises ``Closed``.
* B11 Concurrency. Verbs may overlap on one event loop; nothing else is promised or required.
* B12 Honesty. What ``capabilities`` does not declare raises ``Unsupported`` (an item's option: is the error of
  that item); it never half works.
* B13 No surprises. Threads, clocks, files, randomness and loggers come from the context.
* B14 Refusal is ordinary. Full or too large is ``Stored(REFUSED)``, never an exception.
* B15 Repair. After ``delete`` of a damaged value a new ``store`` of its key is accepted and served.
* B16 Completion. ``done`` is called from the event loop exactly once per item, before the await ends; at most
  once where the await ends by an error or a cancellation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Self

from lmcache_core.spi.api import PLUGIN_API
from lmcache_core.spi.buffers import MemoryKind, Region, ResidentPool
from lmcache_core.spi.context import Context
from lmcache_core.spi.errors import BackendError, Unsupported
from lmcache_core.spi.keys import Key


class Placement(Enum):
    """Which process may run a backend."""

    DAEMON = "daemon"
    WORKER = "worker"


class Durability(Enum):
    """What an acknowledged store survives."""

    NONE = "none"
    PROCESS = "process"
    """The end of this process."""
    POWER = "power"
    """Loss of power of this node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What one backend instance can do; every field is positive and the default claims nothing.

    Attributes:
        ranges: ``load`` honours ``offset`` and ``length``.
        scan: values can be listed.
        usage: ``usage`` answers.
        ttl: ``Store.ttl`` is honoured.
        shared: other processes or nodes see and change the same values.
        persistent: values outlive the process.
        conditional_delete: ``delete_exact`` works.
        prefix_lookup: ``lookup_prefix`` is cheaper than ``lookup``.
        register: the backend gains from ``register``.
        remote_lease: the store can keep a value from leaving for a while (``hold``).
        hints: lookup answers may be out of date (``Found.promise`` False is possible).
        resident: ``pool`` serves values in place.
        memory: kinds of memory the backend can address directly.
        placement: processes that may run it.
        durability: see law B8.
        max_batch: most items in one call, None for any number.
        max_value: most bytes of one value, None for any size.
        alignment: pointers, offsets and lengths must be multiples of this to avoid a bounce copy.
        iov_max: most buffers per item; 1 means the caller provides one contiguous view.
        quiescence_s: bound of law B5 after cancellation.
    """

    ranges: bool = False
    scan: bool = False
    usage: bool = False
    ttl: bool = False
    shared: bool = False
    persistent: bool = False
    conditional_delete: bool = False
    prefix_lookup: bool = False
    register: bool = False
    remote_lease: bool = False
    hints: bool = False
    resident: bool = False
    memory: frozenset[MemoryKind] = field(default=frozenset({MemoryKind.HOST}))
    placement: frozenset[Placement] = field(default=frozenset({Placement.DAEMON}))
    durability: Durability = Durability.NONE
    max_batch: int | None = None
    max_value: int | None = None
    alignment: int = 1
    iov_max: int = 1
    quiescence_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Found:
    """A value that is there.

    Attributes:
        nbytes: stored length.
        etag: opaque version of exactly this value, or None.
        expires: monotonic clock time after which it may be gone, or None.
        promise: True when a load before ``expires`` will succeed unless the store fails.
    """

    nbytes: int
    etag: str | None = None
    expires: float | None = None
    promise: bool = True


@dataclass(frozen=True, slots=True)
class Load:
    """Fill ``into``, back to back, with bytes ``[offset, offset + length)`` of a value.

    Attributes:
        into: writable, contiguous, one-dimensional byte views.
        offset: 0 unless the backend declares ``ranges``.
        length: bytes wanted; None means to the end of the value, and is all there is without ``ranges``.
    """

    key: Key
    into: tuple[memoryview, ...]
    offset: int = 0
    length: int | None = None

    @property
    def room(self) -> int:
        """Bytes that fit into the buffers."""
        return sum(view.nbytes for view in self.into)


class LoadStatus(Enum):
    """How one load ended."""

    FILLED = "filled"
    MISSED = "missed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Loaded:
    """Outcome of one load: ``nbytes`` is meaningful when filled, ``error`` when failed."""

    status: LoadStatus
    nbytes: int = 0
    error: BackendError | None = None

    @classmethod
    def filled(cls, nbytes: int, /) -> Self:
        return cls(LoadStatus.FILLED, nbytes)

    @classmethod
    def failed(cls, error: BackendError, /) -> Self:
        return cls(LoadStatus.FAILED, 0, error)


MISSED = Loaded(LoadStatus.MISSED)


@dataclass(frozen=True, slots=True)
class Store:
    """Keep the concatenation of ``parts`` under ``key``.

    Attributes:
        parts: contiguous, one-dimensional byte views; read-only for the backend.
        ttl: seconds after which the value may be forgotten, None for never.
    """

    key: Key
    parts: tuple[memoryview, ...]
    ttl: float | None = None

    @property
    def nbytes(self) -> int:
        return sum(view.nbytes for view in self.parts)


class StoreStatus(Enum):
    """How one store ended."""

    STORED = "stored"
    PRESENT = "present"
    """A value of this key was already there; nothing was written."""
    REFUSED = "refused"
    """Declined: full, too large, read-only."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Stored:
    """Outcome of one store: ``reason`` when refused, ``error`` when failed."""

    status: StoreStatus
    reason: str = ""
    error: BackendError | None = None

    @classmethod
    def refused(cls, reason: str, /) -> Self:
        return cls(StoreStatus.REFUSED, reason)

    @classmethod
    def failed(cls, error: BackendError, /) -> Self:
        return cls(StoreStatus.FAILED, str(error), error)


STORED = Stored(StoreStatus.STORED)
PRESENT = Stored(StoreStatus.PRESENT)

LoadDone = Callable[[int, Loaded], None] | None
StoreDone = Callable[[int, Stored], None] | None
"""Who is told of each item of a batch (B16), if anybody is."""


@dataclass(frozen=True, slots=True)
class ScanPage:
    """Part of a listing. ``after`` continues it, None when it is complete.

    ``foreign`` names things in the store that are not values of this project, as text for people.
    """

    values: Sequence[tuple[Key, Found]]
    after: str | None
    foreign: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """What a store holds now, and its own limit where it has one."""

    nbytes: int
    values: int
    limit: int | None = None


class AbstractBackend(ABC):
    """A place for write-once values. Async only, batch only, caller-owned buffers; laws B1-B16 above.

    The constructor only remembers; ``open`` does the work. ``capabilities`` is set before ``open`` returns
    and constant afterwards.
    """

    plugin_api: ClassVar[int] = PLUGIN_API
    config_type: ClassVar[type]
    capabilities: Capabilities

    @abstractmethod
    def __init__(self, config: Any, context: Context, /) -> None: ...

    @classmethod
    def unavailable(cls) -> str | None:
        """Tell why this backend cannot work on this machine (library, device), or None. Cheap; imports at most."""
        return None

    @classmethod
    def testing_config(cls) -> Any:
        """Return a configuration that works here without preparation, for ``lmcache plugins verify``.

        Raises:
            Unsupported: there is none; a configuration file must be given.
        """
        raise Unsupported(f"{cls.__name__} has no testing configuration; pass --config FILE")

    async def open(self) -> None:
        """Connect and make ready.

        Raises:
            ConfigError: the configuration cannot work here.
            Unavailable: the store did not answer.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Release everything (B10)."""

    @abstractmethod
    async def lookup(
        self, keys: Sequence[Key], /, *, deadline: float | None = None
    ) -> Sequence[Found | None]:
        """Tell which values are there.

        Args:
            deadline: clock time after which nobody waits any more; a backend may give up then.

        Raises:
            BackendError: no answer for the whole batch.
        """

    @abstractmethod
    async def load(
        self, batch: Sequence[Load], /, *, done: LoadDone = None, deadline: float | None = None
    ) -> Sequence[Loaded]:
        """Copy values into the callers' buffers.

        Behaviour: items are independent; each ends filled, missed or failed (B2, B3, B7).
        Buffers: borrowed until the await ends (B4, B5); a part of a failed item's buffer may have been written.
        Cancellation: ends within ``quiescence_s``, after which nothing touches the buffers.
        Raises: BackendError when no item has a result.
        """

    @abstractmethod
    async def store(
        self, batch: Sequence[Store], /, *, done: StoreDone = None, deadline: float | None = None
    ) -> Sequence[Stored]:
        """Keep values. A key that is there already is ``PRESENT`` and its bytes stay (write-once).

        Behaviour, Buffers, Cancellation, Raises: as ``load``. A cancelled or failed store leaves the whole
        value or nothing (B6).
        """

    @abstractmethod
    async def delete(self, keys: Sequence[Key], /) -> int:
        """Forget values and return how many were there (B9)."""

    def footprint(self, nbytes: int, /) -> int:
        """Bytes a value of this length really occupies; what limits are charged. Pure."""
        return nbytes

    @property
    def pool(self) -> ResidentPool:
        """The memory of a resident tier (capability ``resident``)."""
        raise self._unsupported("pool")

    async def lookup_prefix(self, keys: Sequence[Key], /) -> int:
        """Count how many leading keys are there (capability ``prefix_lookup``)."""
        raise self._unsupported("lookup_prefix")

    async def scan(self, after: str | None = None, /, *, limit: int = 1000) -> ScanPage:
        """List values, in any stable order (capability ``scan``)."""
        raise self._unsupported("scan")

    async def usage(self) -> Usage:
        """Tell how full the store is (capability ``usage``)."""
        raise self._unsupported("usage")

    async def delete_exact(self, key: Key, etag: str, /) -> bool:
        """Delete only if the value still has this etag (capability ``conditional_delete``)."""
        raise self._unsupported("delete_exact")

    async def hold(self, keys: Sequence[Key], seconds: float, /) -> Sequence[bool]:
        """Ask the store to keep values at least this long (capability ``remote_lease``)."""
        raise self._unsupported("hold")

    async def register(self, region: Region, /) -> bool:
        """Prepare a region for direct transfers (capability ``register``); False: it goes on without."""
        raise self._unsupported("register")

    async def unregister(self, region: Region, /) -> None:
        """Undo ``register``; the region may be unmapped afterwards."""
        raise self._unsupported("unregister")

    def screen_load(self, load: Load, /) -> Loaded | None:
        """Answer a load that asks for what is not declared (B12), else None."""
        if not self.capabilities.ranges and (load.offset or load.length is not None):
            return Loaded.failed(self._unsupported("load of a part (ranges)"))
        if len(load.into) > self.capabilities.iov_max:
            return Loaded.failed(self._unsupported(f"{len(load.into)} buffers (iov_max)"))
        return None

    def screen_store(self, store: Store, /) -> Stored | None:
        """Answer a store that asks for what is not declared (B12) or is too large (B14), else None."""
        limit = self.capabilities.max_value
        if store.ttl is not None and not self.capabilities.ttl:
            return Stored.failed(self._unsupported("ttl"))
        if len(store.parts) > self.capabilities.iov_max:
            return Stored.failed(self._unsupported(f"{len(store.parts)} buffers (iov_max)"))
        if limit is not None and store.nbytes > limit:
            return Stored.refused(f"too large: {store.nbytes} bytes, at most {limit}")
        return None

    def screen_batch(self, operation: str, batch: Sequence[Any], /) -> None:
        """Raise ``Unsupported`` for more items than ``max_batch`` (B12)."""
        limit = self.capabilities.max_batch
        if limit is not None and len(batch) > limit:
            raise self._unsupported(f"{operation} of {len(batch)} items (max_batch {limit})")

    def _unsupported(self, verb: str) -> Unsupported:
        return Unsupported(f"{type(self).__name__} does not support {verb}", operation=verb)
