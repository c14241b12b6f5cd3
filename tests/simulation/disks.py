"""The disk backend on a simulated file system, as a tier of histories, and what must survive the ends of its process.

A call fails (EIO, no room), falls short, is slow, or hangs; the process ends between any two calls, and with it
now and then the power. Whatever was acknowledged must be there again as far as ``sync`` promises, and whole.
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lmcache_backend_disk import DiskBackend, FsBackend
from lmcache_backend_disk.backend import ENTRY_NBYTES
from lmcache_backend_disk.config import DiskConfig, Sync

from lmcache_core import ops
from lmcache_core.spi import (
    AbstractBackend,
    Context,
    Key,
    Store,
    Stored,
    StoreDone,
    StoreStatus,
    Wrapper,
)
from lmcache_core.testing.contexts import simulated_context
from lmcache_core.testing.disk import Node
from lmcache_core.testing.files import SimCrash, SimDisk, SimFiles
from lmcache_core.testing.places import FACTORIES, Place
from lmcache_core.testing.simulation import SimClock, SimExecutor
from lmcache_core.testing.worlds import PAGE

UNFAILING = ("close", "status_of", "lock")


class DiskPlace(Place):
    """A disk, and one process after another that keeps values there.

    Attributes:
        told: digests of values that are acknowledged and not deleted since; None: another store's.
        timed: values that may have been stored for a time only.
        crash_in: system calls until the process ends, then ``crash`` is called; 0: it goes on.
    """

    def __init__(self, context: Context, source: random.Random, shared: bool) -> None:
        super().__init__(self.backend, self._used, self._calm, lambda: self.met, self._keys)
        self.context, self.random, self.shared = context, source, shared
        self.sync = source.choice((Sync.DURABLE, Sync.DURABLE, Sync.ORDERED, Sync.NONE))
        self.disk = SimDisk(
            source.getrandbits(32), direct=source.choice((0, 512)), wall=SimClock().wall,
            links=source.random() < 0.7, capacity=source.choice((1 << 30, 1 << 30, 60 * PAGE)),
        )  # fmt: skip
        self.rates = {
            "EIO": source.choice((0.0, 0.01, 0.05)), "ENOSPC": source.choice((0.0, 0.05)),
            "short": source.choice((0.0, 0.3)), "slow": source.choice((0.0, 0.05)),
            "hung": source.choice((0.0, 0.002)),
        }  # fmt: skip
        self.met = Counter[str]()
        self.told: dict[Key, bytes | None] = {}
        self.begun: dict[Key, set[bytes]] = {}
        self.timed: set[Key] = set()
        self.deletions = Counter[Key]()
        self.active = False
        self.calmed = False
        self.failed = False
        """The last call; the next one does not, as errors that pass by."""
        self.crash_in = 0
        self.crash: Callable[[], None] = lambda: None

    def backend(self) -> AbstractBackend:
        """Of a process that is new, or has closed its last one."""
        self.executor = SimExecutor()
        self.files = SimFiles(self.disk, before=self._before)
        context = simulated_context(
            tier=self.context.tier, files=self.files, executor=self.executor, pid=1000,
            random=random.Random(self.random.getrandbits(64)),
        )  # fmt: skip
        config = DiskConfig(path="/kv", fan_out=16, sync=self.sync)
        kind = FsBackend if self.shared else DiskBackend
        return Told(self, context, kind(config, context))

    def died(self, *, power: bool) -> None:
        """The process is gone, perhaps with the power: look at what is left.

        Raises:
            AssertionError: it is less than was promised.
        """
        self.active, self.crash_in = False, 0
        if power:
            self.disk.lose_power()
            if self.sync is not Sync.DURABLE:
                self.told.clear()
        else:
            self.files.kill()
        self.met["power" if power else "process"] += 1
        self._look(power=power)

    def _look(self, *, power: bool = False) -> None:
        """What is told is there, and whole, at every moment."""
        found = {key: ops.digest(node.content, 0) for key, node in self._values()}
        lost = [key for key, digest in self.told.items() if digest not in (None, found.get(key))]
        lost += [key for key in self.told if key not in found]
        assert not lost, f"acknowledged and lost: {lost}"
        if power and self.sync is Sync.NONE:  # frames tell
            for key, digest in found.items():
                self.begun.setdefault(key, set()).add(digest)
        torn = [key for key, digest in found.items() if digest not in self.begun.get(key, ())]
        assert not torn, f"visible and not whole: {torn}"

    def opened(self) -> None:
        self.active = not self.calmed
        left = [path for path in self.disk.walk() if "/tmp/" in path]
        assert self.shared or not left, f"left by a process that is gone: {left}"

    def _calm(self) -> None:
        self._look()
        self.active, self.calmed, self.crash_in = False, True, 0

    def _before(self, call: str, nbytes: int) -> None:
        if self.crash_in:
            self.crash_in -= 1
            if not self.crash_in:
                self.files.crash_at = self.files.calls - 1
                self.crash()
                raise SimCrash(call)
        if not self.active:
            return
        if nbytes > 512 and self._meets("short"):
            self.files.shorten(call)
        if self._meets("slow"):
            self.executor.spend(self.random.uniform(0, 0.5))
        if self._meets("hung"):
            self.executor.spend(self.random.uniform(1, 60))
        for name in ("EIO", "ENOSPC")[: 2 if call in ("allocate", "pwritev", "link") else 1]:
            if call not in UNFAILING and not self.failed and self._meets(name):
                self.failed, code = True, getattr(errno, name)
                raise OSError(code, os.strerror(code))
        self.failed = False

    def _meets(self, fault: str) -> bool:
        meets = 0 < self.rates[fault] > self.random.random()
        self.met[f"disk {fault}"] += meets
        return meets

    def _values(self) -> list[tuple[Key, Node]]:
        kv = self.disk.root.entries.get("kv")
        shards = [] if kv is None else [each for name, each in kv.entries.items() if len(name) == 1]
        return [(Key.parse(name), node) for each in shards for name, node in each.entries.items()]

    def _keys(self) -> list[Key]:
        return [key for key, _ in self._values()]

    def _used(self) -> int:
        return sum(node.allocated + ENTRY_NBYTES for _, node in self._values())


class Told(Wrapper):
    """Keeps account of what the backend says it has."""

    def __init__(self, place: DiskPlace, context: Context, inner: AbstractBackend, /) -> None:
        super().__init__(None, context, inner)
        self.place = place

    async def open(self) -> None:
        await super().open()
        self.place.opened()

    async def store(
        self, batch: Sequence[Store], /, *, done: StoreDone = None, deadline: float | None = None
    ) -> Sequence[Stored]:
        place, digests = self.place, list[bytes]()
        for each in batch:
            digests.append(ops.digest(b"".join(each.parts), 0))
            place.begun.setdefault(each.key, set()).add(digests[-1])
            if each.ttl is not None:
                place.timed.add(each.key)
        before = [place.deletions[each.key] for each in batch]

        def told(at: int, result: Stored) -> None:
            key = batch[at].key
            if key not in place.timed and before[at] == place.deletions[key]:
                if result.status is StoreStatus.STORED:
                    place.told[key] = digests[at]
                elif result.status is StoreStatus.PRESENT:
                    place.told.setdefault(key, None)
            if done is not None:
                done(at, result)

        results = await super().store(batch, done=told, deadline=deadline)
        return results

    async def delete(self, keys: Sequence[Key], /) -> int:
        return int(await self._deleting(keys, super().delete(keys)))

    async def delete_exact(self, key: Key, etag: str, /) -> bool:
        return bool(await self._deleting([key], super().delete_exact(key, etag)))

    async def _deleting(self, keys: Sequence[Key], work: Any) -> Any:
        for key in keys:
            self.place.told.pop(key, None)
            self.place.deletions[key] += 1
        try:
            return await work
        finally:
            for key in keys:
                self.place.deletions[key] += 1
                self.place.told.pop(key, None)


FACTORIES["disk"] = DiskPlace
