"""A backend on a simulated disk, driven without an event loop: the laws have tested the loop's side."""

import hashlib
import logging
import random

import pytest
from lmcache_backend_disk import DiskBackend
from lmcache_backend_disk.config import DiskConfig

from lmcache_core.spi import Key, Load, LoadStatus, Store, StoreStatus
from lmcache_core.testing.contexts import simulated_context
from lmcache_core.testing.files import SimDisk, SimFiles

SPACE = hashlib.sha256(b"space").digest()


class HandClock:
    """Time that a test moves; one clock for all processes on its disk."""

    def __init__(self):
        self.at = 1_700_000_000.0
        self.booted = self.at - 50.0

    def wall(self):
        return self.at

    def now(self):
        return self.at - self.booted


class Rig:
    """One process with one backend on a disk that outlives it."""

    def __init__(self, disk=None, *, backend=DiskBackend, pid=1000, seed=0, clock=None, **options):
        self.clock = clock or HandClock()
        self.disk = disk or SimDisk(wall=self.clock.wall)
        self.files = SimFiles(self.disk)
        self.log = logging.getLogger("lmcache.tier.disk")
        context = simulated_context(
            tier="disk", files=self.files, pid=pid, random=random.Random(seed), clock=self.clock
        )
        self.backend = backend(DiskConfig(**({"path": "/kv", "fan_out": 16} | options)), context)

    def open(self):
        self.backend.open_blocking()
        return self

    def close(self):
        self.backend.close_blocking()
        assert self.files.open_paths == []

    def again(self, **options):
        """The next process on the same disk, opened."""
        config = self.backend.config
        kept = {name: getattr(config, name) for name in config.__slots__}
        rig = Rig(
            self.disk, backend=type(self.backend), seed=1, clock=self.clock, **(kept | options)
        )
        return rig.open()

    @staticmethod
    def key(number):
        return Key(SPACE, hashlib.sha256(b"%d" % number).digest(), 0)

    @staticmethod
    def value(number, nbytes=5000):
        return random.Random(number).randbytes(nbytes)

    @staticmethod
    def path(number, root="/kv"):
        name = Rig.key(number).text
        return f"{root}/{name[-1]}/{name}"

    def store(self, number, nbytes=5000, ttl=None):
        value = memoryview(self.value(number, nbytes))
        return self.backend.store_blocking(Store(self.key(number), (value,), ttl))

    def keep(self, *numbers):
        for number in numbers:
            stored = self.store(number)
            assert stored.status is StoreStatus.STORED, stored

    def lookup(self, *numbers):
        return list(self.backend.lookup_blocking([self.key(number) for number in numbers]))

    def load(self, number, nbytes=5000, offset=0, length=None):
        buffer = bytearray(nbytes)
        load = Load(self.key(number), (memoryview(buffer),), offset, length)
        return self.backend.load_blocking(load), bytes(buffer)

    def get(self, number):
        """The whole value, or None for a miss; anything else fails."""
        (found,) = self.lookup(number)
        if found is None:
            return None
        loaded, buffer = self.load(number, found.nbytes)
        assert loaded.status is LoadStatus.FILLED, loaded
        return buffer

    def delete(self, *numbers):
        return self.backend.delete_blocking([self.key(number) for number in numbers])

    def listing(self, limit=1000):
        """All pages of a scan: keys and foreign paths."""
        keys, foreign, after = [], [], None
        while True:
            page = self.backend._scan(after, limit)
            assert len(page.values) + len(page.foreign) <= limit
            keys += [key for key, _ in page.values]
            foreign += page.foreign
            after = page.after
            if after is None:
                return keys, foreign


@pytest.fixture
def new_rig():
    """Make a ``Rig``, not yet opened."""
    return Rig


@pytest.fixture
def rig():
    """An opened one."""
    return Rig().open()
