"""Calls on one store: batches between its segments and the callers' memory, numbers to results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lmcache_backend_mooncake import native
from lmcache_backend_mooncake.config import MooncakeConfig
from lmcache_core.spi import (
    MISSED,
    PRESENT,
    STORED,
    BufferTooSmall,
    Key,
    Load,
    Loaded,
    Region,
    Store,
    Stored,
    Unavailable,
)

LEFT_S = 59.0
"""A transfer that failed after so long may still run: the library has only ceased to wait for it."""
CALL_NBYTES = 64 << 20
"""Most bytes of one call, so that its time has a bound and its values are told early."""

LEFT: list[Any] = []
"""Clients of the library that end with the process, not before."""

Tell = Callable[[int, Any], None]
Item = tuple[int, Any]


class Flight:
    """One lane of a batch: whether anybody still wants it, and since when its present call runs."""

    __slots__ = ("abandoned", "since")

    def __init__(self) -> None:
        self.abandoned = False
        self.since: float | None = None


class Client:
    """Thread-safe.

    Args:
        connect: makes the library's client, and what says where values go.
        now: a clock.
        warn: says one line.
    """

    def __init__(
        self,
        config: MooncakeConfig,
        connect: Callable[[MooncakeConfig], tuple[Any, Any]],
        now: Callable[[], float],
        warn: Callable[[str], None],
    ) -> None:
        self.config = config
        self._now, self._warn = now, warn
        self._spare = native.numbers(config.master)
        before = native.queues()  # the client's own are known by comparing
        self.store, self._how = connect(config)
        self._queues = native.queues() - before
        self._cuts, self._stale = 0, False
        self._regions: dict[int, int] = {}
        self._lock = threading.Lock()

    def name(self, key: Key) -> str:
        return self.config.prefix + key.text

    def close(self) -> None:
        """Nothing may run: the library does not bear it."""
        if self.config.elected:
            # It would hold the interpreter's lock until its watch of the election ends, 30 s later.
            LEFT.append(self.store)
        else:
            self.store.close()

    def cut(self) -> None:
        """Make transfers that run now fail now."""
        if native.cut(self._queues, self._spare):
            self._cuts, self._stale = self._cuts + 1, True

    # -- values ----------------------------------------------------------------------------------------------

    def load(self, items: Sequence[Item], tell: Tell, flight: Flight) -> None:
        """Copy values into the callers' memory."""
        for part in _parts(items, lambda load: load.room, flight):
            loads: list[Load] = [load for _, load in part]
            names = [self.name(load.key) for load in loads]
            views = [load.into[0] if load.into else memoryview(b"") for load in loads]
            with self._registered(views) as places:
                sizes = [view.nbytes for view in views]
                codes = self._call(flight, self.store.batch_get_into, names, places, sizes)
            for (at, load), name, code in zip(part, names, codes, strict=True):
                tell(at, self._loaded(load, name, code))

    def _loaded(self, load: Load, name: str, code: int) -> Loaded:
        if code == native.INVALID:
            nbytes = self.store.get_size(name)
            if nbytes > load.room:
                needs = f"{load.key!r} needs {nbytes} bytes, the buffers have {load.room}"
                return Loaded.failed(BufferTooSmall(needs, operation="load"))
            code = nbytes if nbytes < 0 else code
        if code >= 0:
            return Loaded.filled(code)
        if code in native.GONE:
            return MISSED
        return Loaded.failed(Unavailable(native.said(code), operation="load"))

    def store_all(self, items: Sequence[Item], tell: Tell, flight: Flight) -> None:
        """Keep values that are not there yet."""
        for part in _parts(items, lambda store: store.nbytes, flight):
            there = self.exist([self.name(store.key) for _, store in part])
            new = []
            for (at, store), answer in zip(part, there, strict=True):
                if answer == 1:
                    tell(at, PRESENT)
                elif answer < 0:
                    tell(at, _stored(answer))
                else:
                    new.append((at, store))
            if not new:
                continue
            stores: list[Store] = [store for _, store in new]
            views = [store.parts[0] for store in stores]
            names = [self.name(store.key) for store in stores]
            with self._registered(views) as places:
                sizes = [view.nbytes for view in views]
                put = self.store.batch_put_from
                codes = self._call(flight, put, names, places, sizes, self._how)
            for (at, _), code in zip(new, codes, strict=True):
                tell(at, _stored(code))

    def _call(self, flight: Flight, call: Callable[..., Sequence[int]], *words: Any) -> Any:
        """One call that moves values; does not come back while the library may still touch memory."""
        began = flight.since = self._now()
        cuts = self._cuts
        try:
            codes = call(*words)
            if native.TRANSFER in codes and self._stale and self._cuts == cuts:
                # The library finds out only by using them which connections were cut before.
                self._stale, flight.since = False, self._now()
                codes = call(*words)
        finally:
            flight.since = None
        if native.TRANSFER in codes and self._now() - began >= LEFT_S:
            self._warn("a transfer was left to itself; its memory is never used again")
            threading.Event().wait()
        return codes

    # -- keys ------------------------------------------------------------------------------------------------

    def exist(self, names: Sequence[str]) -> list[int]:
        """1, 0, or an error for each; what is there is leased."""
        return list(self.store.batch_is_exist(list(names)))

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Length of each value that is there.

        Raises:
            Unavailable: no answer.
        """
        answers = self.exist(names)
        if answers and all(answer < 0 for answer in answers):
            raise Unavailable(native.said(answers[0]), operation="lookup")
        there = [name for name, answer in zip(names, answers, strict=True) if answer == 1]
        replicas = self.store.batch_get_replica_desc(there) if there else {}
        return [self._size(name, replicas[name]) if name in replicas else None for name in names]

    def _size(self, name: str, replicas: Sequence[Any]) -> int | None:
        for replica in replicas:
            if replica.is_memory_replica():
                return int(replica.get_memory_descriptor().buffer_descriptor.size)
        nbytes = int(self.store.get_size(name))  # on a disk of some client
        return nbytes if nbytes >= 0 else None

    def remove(self, names: Sequence[str]) -> int:
        """Forget values although they are leased; how many were there.

        Raises:
            BackendError: not one answer.
        """
        codes = list(self.store.batch_remove(list(names), True))
        bad = [code for code in codes if code < 0 and code not in native.GONE]
        if bad and len(bad) == len(codes):
            raise Unavailable(native.said(bad[0]), operation="delete")
        return sum(code == 0 for code in codes)

    # -- memory ----------------------------------------------------------------------------------------------

    def register(self, region: Region) -> bool:
        """Let transfers go straight to and from a region."""
        with self._lock:
            code = self.store.register_buffer(region.pointer, region.nbytes)
            if code == 0:
                self._regions[region.pointer] = region.nbytes
        return bool(code == 0)

    def unregister(self, region: Region) -> None:
        with self._lock:
            if self._regions.pop(region.pointer, None) is not None:
                self.store.unregister_buffer(region.pointer)

    @contextmanager
    def _registered(self, views: Sequence[memoryview]) -> Iterator[list[int]]:
        """Addresses of views; over RDMA with all of them registered, if only for this call."""
        places = [native.address(view) for view in views]
        added: list[int] = []
        if self.config.over != "tcp":
            for place, view in zip(places, views, strict=True):
                if not view.nbytes or self._covers(place, view.nbytes):
                    continue
                if code := self.store.register_buffer(place, view.nbytes):
                    raise Unavailable(f"cannot register {view.nbytes} bytes: {native.said(code)}")
                added.append(place)
        try:
            yield places
        finally:
            for place in added:
                self.store.unregister_buffer(place)

    def _covers(self, place: int, nbytes: int) -> bool:
        with self._lock:
            return any(
                first <= place and place + nbytes <= first + size
                for first, size in self._regions.items()
            )


def _parts(
    items: Sequence[Item], nbytes: Callable[[Any], int], flight: Flight
) -> Iterator[list[Item]]:
    """Items in calls of a bounded size, no key twice in one.

    Raises:
        Unavailable: nobody wants the next one.
    """
    part: list[Item] = []
    keys: set[Key] = set()
    total = 0
    for at, item in items:
        if part and (total + nbytes(item) > CALL_NBYTES or item.key in keys):
            yield part
            part, keys, total = [], set(), 0
        if flight.abandoned:
            raise Unavailable("cancelled before it began")
        part.append((at, item))
        keys.add(item.key)
        total += nbytes(item)
    if part:
        yield part


def _stored(code: int) -> Stored:
    if code == 0:
        return STORED
    if code in native.FULL:
        return Stored.refused(f"full: {native.said(code)}")
    return Stored.failed(Unavailable(native.said(code), operation="store"))
