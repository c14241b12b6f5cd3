"""What a client holds of a daemon's memory: leases, reservations, and the segments they lie in."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import overload

from lmcache_core import ops
from lmcache_core.memory.arena import ArenaMap
from lmcache_core.spi.buffers import Extent
from lmcache_core.spi.errors import Closed
from lmcache_core.spi.keys import Key
from lmcache_core.wire.codec import Reply
from lmcache_core.wire.records import Abort, Dispatch, Record, Release
from lmcache_core.wire.replies import Granted, Reserved

IDENTITY = 16
_MOST_SPARE = 128 << 20
_SLICE = 8 << 20
WORDS = 4
"""Numbers per extent: segment, base, length, generation."""


class Home:
    """One life of a daemon as a client knows it: its boot, our session there, its memory mapped here.

    What was granted keeps it alive, and so the mapping outlives the daemon.

    Attributes:
        held: grants in use.
        dispatched: grants handed to so many ranks of an engine, of which the daemon may not have heard.
        over: granted to this process by others, and ended before it took them.
        floor: as ``over``, for everything up to this number that is not in use.
        claimed: the daemon may have ended what was not in use, and has not said so yet: nothing is added now.
        unsure: it may have done so before, and its answer was lost.
    """

    def __init__(self, boot: bytes, session: bytes, *, writable: bool) -> None:
        self.boot = boot
        self.session = session
        self.writable = writable
        self.pid = os.getpid()
        self.backed: dict[int, int] = {}
        self.populated: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.held: set[int] = set()
        self.dispatched: dict[int, tuple[str, int]] = {}
        self.over: set[int] = set()
        self.claimed = self.unsure = False
        self.floor = 0
        self.ended: list[int] = []
        self.ended_parts: dict[int, list[int]] = {}
        self.aborted: list[int] = []
        self.lock = threading.Lock()
        self._maps: dict[int, ArenaMap] = {}

    def map(self, segments: Iterable[tuple[int, int, int]], descriptors: Sequence[int]) -> None:
        """Map segments not mapped yet; closes the descriptors.

        Raises:
            ValueError, OSError: not what a daemon's memory looks like.
        """
        try:
            for (number, nbytes, backed), descriptor in zip(segments, descriptors, strict=True):
                with self.lock:
                    self.backed[number] = backed
                    if number not in self._maps:
                        part = [(number, nbytes, descriptor)]
                        self._maps[number] = ArenaMap(part, writable=self.writable)
                        self.sizes[number] = nbytes
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def populate(self, stop: Callable[[], bool]) -> None:
        """Fault in what the daemon has backed, so that no call pays for it."""
        for number, backed in list(self.backed.items()):
            done = self.populated.get(number, 0)
            while done < backed and not stop():
                size = min(_SLICE, backed - done)
                ops.populate(self.view(Extent(number, done, size, 0)))
                done += size
            self.populated[number] = done

    def claim(self) -> list[int]:
        """What is in use, to be said in a hello that ends everything else."""
        with self.lock:
            self.unsure, self.claimed = self.claimed, True
            return sorted({*self.held, *self.dispatched})

    def rejoined(self, over: Iterable[int], granted: int) -> None:
        """The daemon has answered a hello: what that has ended, and the number of its last grant."""
        with self.lock:
            self.over.update(over)
            if self.unsure:
                self.floor = granted
            self.claimed = self.unsure = False

    def follow(self, before: Home | None, granted: int) -> None:
        """What may be over in the earlier session of this process is so here.

        In its first one everything: it may have been for a process that had our place, and died.
        """
        if before is None:
            self.floor = granted
        elif before.boot == self.boot:
            self.over, self.floor = before.over, before.floor
            self.claimed, self.unsure = before.claimed, before.unsure

    def adopt(self, grant: int) -> bool:
        """Take over what was granted to another process for us; False: it may be over, and is now.

        0: that process holds it itself, as the daemon did not hear of us.
        """
        with self.lock:
            if grant and (self.claimed or grant in self.over or grant <= self.floor):
                self.ended.append(grant)
                return False
            self.held.add(grant)
            return True

    def note(self, reply: Reply, said: Iterable[Record]) -> None:
        """Grants count as held from the moment they are read off the socket; what stood before the request was heard."""
        with self.lock:
            self.held.update(_grants(reply))
            if self.dispatched:
                for record in said:
                    for grant in record.grants if isinstance(record, Dispatch) else ():
                        self.dispatched.pop(grant, None)

    def late(self, reply: Reply) -> None:
        """Nobody waits for this reply any more: give back what it grants."""
        with self.lock:
            self.held.difference_update(_grants(reply))
            (self.ended if isinstance(reply, Granted) else self.aborted).extend(_grants(reply))

    def unless_used(self, reply: Reply) -> UnlessUsed:
        """Give back what a reply grants when what is made of it fails: memory that could not be mapped in time."""
        return UnlessUsed(self, reply)

    def endings(self) -> list[Record]:
        """What the daemon has not been told yet."""
        if not (self.ended or self.ended_parts or self.aborted or self.dispatched):
            return []
        with self.lock:
            ended, self.ended = self.ended, []
            parts, self.ended_parts = self.ended_parts, {}
            aborted, self.aborted = self.aborted, []
            said: list[Record] = [
                Dispatch(to, [grant], ranks) for grant, (to, ranks) in self.dispatched.items()
            ]
        if ended or parts:
            said.append(Release(ended, [*parts.items()]))
        if aborted:
            said.append(Abort(aborted))
        return said

    def unsaid(self, said: Iterable[Record]) -> None:
        """Endings that may not have arrived; saying them twice is harmless."""
        with self.lock:
            for record in said:
                if isinstance(record, Release):
                    self.ended += record.grants
                    for grant, positions in record.parts:
                        self.ended_parts.setdefault(grant, []).extend(positions)
                elif isinstance(record, Abort):
                    self.aborted += record.grants

    def knows(self, packed: bytes) -> bool:
        """Whether all segments of packed extents are mapped here."""
        with memoryview(packed).cast("Q") as words:
            return {*words[::WORDS].tolist()} <= self._maps.keys()

    def view(self, extent: Extent) -> memoryview:
        """The bytes of an extent.

        Raises:
            Closed: the process has forked since; the memory is not mapped here.
        """
        if self.pid != os.getpid():
            raise Closed("memory of the daemon is not there after a fork")
        if not extent.nbytes:
            return memoryview(bytearray())
        return self._maps[extent.segment].view(extent)

    def current(self, extent: Extent) -> bool:
        """Whether the place still belongs to the value it was named for; ask again after the copy."""
        return not extent.nbytes or self._maps[extent.segment].current(extent)


class UnlessUsed:
    """What ``Home.unless_used`` returns."""

    __slots__ = ("_home", "_reply")

    def __init__(self, home: Home, reply: Reply) -> None:
        self._home = home
        self._reply = reply

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is not None:
            self._home.late(self._reply)


def _grants(reply: Reply) -> list[int]:
    if isinstance(reply, Granted):
        return [reply.grant] if reply.grant else []
    return [grant for grant in reply.grants if grant] if isinstance(reply, Reserved) else []


class Spare:
    """Buffers of streamed values, used again after their leases: fresh memory costs more than the copy."""

    def __init__(self) -> None:
        self._buffers: dict[int, list[memoryview]] = {}
        self._nbytes = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> memoryview:
        """A writable buffer of exactly this length, its content undefined."""
        with self._lock:
            if found := self._buffers.get(nbytes):
                self._nbytes -= nbytes
                return found.pop()
        return memoryview(bytearray(nbytes))

    def give(self, buffers: Iterable[memoryview]) -> None:
        with self._lock:
            for buffer in buffers:
                if self._nbytes + buffer.nbytes <= _MOST_SPARE:
                    self._nbytes += buffer.nbytes
                    self._buffers.setdefault(buffer.nbytes, []).append(buffer)


class RemoteLease:
    """Right to read one value (``spi.Lease``): one item of ``RemoteLeases``."""

    __slots__ = ("batch", "position")

    def __init__(self, batch: RemoteLeases, position: int) -> None:
        self.batch = batch
        self.position = position

    @property
    def key(self) -> Key:
        return self.batch.keys[self.position]

    @property
    def extent(self) -> Extent:
        at = WORDS * self.position
        return Extent(*self.batch.words[at : at + WORDS])

    @property
    def identity(self) -> bytes:
        return self.batch.identities[IDENTITY * self.position : IDENTITY * (self.position + 1)]

    @property
    def view(self) -> memoryview:
        """Read-only bytes of the value.

        Raises:
            ValueError: the lease has ended.
        """
        if not self.batch.open[self.position]:
            raise ValueError(f"lease of {self.key!r} has ended")
        if self.batch.values is not None:
            return self.batch.values[self.position].toreadonly()
        return self.batch.home.view(self.extent).toreadonly()

    @property
    def current(self) -> bool:
        """False when what was copied out of ``view`` until now may be another value's bytes."""
        return self.batch.values is not None or self.batch.home.current(self.extent)


class RemoteLeases(Sequence[RemoteLease]):
    """Leases granted together; items are made when asked for.

    ``values`` are bytes of a stream, from ``spare``, where they return when all leases have ended.
    """

    __slots__ = ("grant", "home", "identities", "keys", "open", "spare", "values", "words")

    def __init__(
        self,
        home: Home,
        grant: int,
        keys: Sequence[Key],
        packed: bytes,
        identities: bytes,
        values: Sequence[memoryview] | None = None,
        spare: Spare | None = None,
    ) -> None:
        self.home = home
        self.grant = grant
        self.spare = spare
        self.keys = keys
        self.words = memoryview(packed).cast("Q")
        self.identities = identities
        self.values = values
        self.open = bytearray(b"\1") * (len(self.words) // WORDS)

    def __len__(self) -> int:
        return len(self.open)

    @overload
    def __getitem__(self, at: int, /) -> RemoteLease: ...
    @overload
    def __getitem__(self, at: slice, /) -> list[RemoteLease]: ...
    def __getitem__(self, at: int | slice, /) -> RemoteLease | list[RemoteLease]:
        if isinstance(at, slice):
            return [RemoteLease(self, i) for i in range(*at.indices(len(self.open)))]
        if not -len(self.open) <= at < len(self.open):
            raise IndexError(at)
        return RemoteLease(self, at % len(self.open))

    def end(self, positions: Iterable[int] | None = None) -> None:
        """Note that leases are over; the client tells the daemon with its next record."""
        home = self.home
        with home.lock:
            if positions is None:
                self.open = bytearray(len(self.open))
            else:
                parts = [at for at in positions if self.open[at]]
                for at in parts:
                    self.open[at] = 0
                if any(self.open):
                    if self.grant:
                        home.ended_parts.setdefault(self.grant, []).extend(parts)
                    return
            if self.grant in home.held:
                home.held.discard(self.grant)
                home.ended.append(self.grant)
            spare, self.spare = self.spare, None
        if spare is not None and self.values is not None and not any(self.open):
            spare.give(self.values)


class RemoteReservation:
    """Memory promised to this client (``spi.Reservation``)."""

    __slots__ = ("extent", "grant", "home", "key", "local")

    def __init__(
        self, home: Home, grant: int, key: Key, extent: Extent, *, local: bool = False
    ) -> None:
        self.home = home
        self.grant = grant
        self.key = key
        self.extent = extent
        self.local = memoryview(bytearray(extent.nbytes)) if local else None

    @property
    def view(self) -> memoryview:
        """Writable bytes, exactly as many as were asked for.

        Raises:
            ValueError: the reservation has ended.
        """
        if self.grant not in self.home.held:
            raise ValueError(f"reservation of {self.key!r} has ended")
        return self.local if self.local is not None else self.home.view(self.extent)

    def end(self, *, abort: bool) -> None:
        """Note the end; idempotent."""
        with self.home.lock:
            if self.grant in self.home.held:
                self.home.held.discard(self.grant)
                if abort:
                    self.home.aborted.append(self.grant)
