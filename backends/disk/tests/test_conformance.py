"""Both backends keep the laws, on a real disk and on a simulated one."""

import itertools
import os
from typing import ClassVar

import pytest
from lmcache_backend_disk import DiskBackend, FsBackend
from lmcache_backend_disk.config import Direct, DiskConfig, Sync

from lmcache_core.testing.backend import BackendTests
from lmcache_core.testing.contexts import simulated_context
from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.testing.files import SimDisk, SimFiles

_numbers = itertools.count()


FAN_OUT = 16


def path_of(folder, key):
    return f"{folder}/{key.text[-1]}/{key.text}"


class OnRealDisk(BackendTests):
    backend = DiskBackend
    options: ClassVar = {}

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = str(tmp_path / "kv")

    def make_backend(self):
        folder = self.folder = f"{self.folder}{next(_numbers)}"
        return self.backend(
            DiskConfig(path=folder, fan_out=FAN_OUT, **self.options), real_context()
        )

    def reopen(self, store):
        return self.backend(store.config, real_context())

    def peek(self, key):
        try:
            with open(path_of(self.folder, key), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def poke(self, key, value):
        with open(path_of(self.folder, key), "wb") as file:
            file.write(value)

    def damage(self, key):
        os.truncate(path_of(self.folder, key), 7)


class TestDisk(OnRealDisk):
    """Direct, ordered: the defaults."""


class TestDiskThroughThePageCache(OnRealDisk):
    options: ClassVar = {"direct": Direct.OFF, "sync": Sync.NONE}


class TestDiskDurable(OnRealDisk):
    options: ClassVar = {"sync": Sync.DURABLE, "verify_writes": True}


class TestFs(OnRealDisk):
    backend = FsBackend


class OnSimulatedDisk(BackendTests):
    backend = DiskBackend
    simulated = True
    options: ClassVar = {}

    def make_backend(self):
        self.disk = SimDisk(next(_numbers))
        return self._on(self.disk)

    def make_small_backend(self, nbytes):
        return self._on(SimDisk(capacity=nbytes))

    def reopen(self, store):
        return self._on(self.disk)

    def crash(self, store):
        store.context.files.kill()
        if store.config.sync is Sync.DURABLE:
            self.disk.lose_power()
        return self._on(self.disk)

    def peek(self, key):
        try:
            return self.disk.peek(path_of("/kv", key))
        except FileNotFoundError:
            return None

    def poke(self, key, value):
        self.disk.plant(path_of("/kv", key), value)

    def damage(self, key):
        self.disk.cut(path_of("/kv", key), 7)

    def _on(self, disk):
        context = simulated_context(files=SimFiles(disk))
        return self.backend(DiskConfig(path="/kv", fan_out=FAN_OUT, **self.options), context)


class TestSimulatedDisk(OnSimulatedDisk):
    options: ClassVar = {"sync": Sync.DURABLE}


class TestSimulatedDiskThroughThePageCache(OnSimulatedDisk):
    options: ClassVar = {"direct": Direct.OFF, "sync": Sync.NONE}


class TestSimulatedFs(OnSimulatedDisk):
    backend = FsBackend
    options: ClassVar = {"sync": Sync.DURABLE}


class TestSimulatedFsWithoutLinks(OnSimulatedDisk):
    backend = FsBackend

    def make_backend(self):
        self.disk = SimDisk(next(_numbers), links=False, direct=0)
        return self._on(self.disk)
