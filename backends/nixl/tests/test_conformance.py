"""The laws, on every kind of rail, real throughout."""

import itertools
import shutil

import pytest
from lmcache_backend_nixl import NixlBackend
from lmcache_backend_nixl.config import NixlConfig, RailConfig
from lmcache_backend_nixl.serving import TargetServer

from lmcache_core.spi import ByteSize
from lmcache_core.testing.backend import BackendTests
from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.testing.stateful import StatefulBackendTests

_numbers = itertools.count()


class NixlTests(BackendTests, StatefulBackendTests):
    plugin = "nixl"
    examples, steps = 1, 12

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path

    def reopen(self, store):
        return NixlBackend(store.config, real_context())


class TestFiles(NixlTests):
    def crash(self, store):
        """What another process finds: the files as they are now."""
        self.config = NixlConfig(path=f"{store.config.path}-{next(_numbers)}")
        shutil.copytree(store.config.path, self.config.path)
        return NixlBackend(self.config, real_context())

    def make_backend(self):
        self.config = NixlConfig(path=str(self.folder / f"kv{next(_numbers)}"))
        return NixlBackend(self.config, real_context())

    def place(self, key):
        return f"{self.config.path}/{key.text[-2:]}/{key.text}"

    def peek(self, key):
        try:
            with open(self.place(key), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def poke(self, key, value):
        with open(self.place(key), "wb") as file:
            file.write(value)

    def damage(self, key):
        self.poke(key, b"other")


class TestStripes(NixlTests):
    def make_backend(self):
        folders = (self.folder / f"kv{next(_numbers)}" for _ in range(3))
        rails = tuple(RailConfig(path=str(folder)) for folder in folders)
        return NixlBackend(NixlConfig(rails=rails, stripe=ByteSize(1 << 16)), real_context())


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    with TargetServer(tmp_path_factory.mktemp("target")) as found:
        yield found


class TestMemory(NixlTests):
    @pytest.fixture(autouse=True)
    def _target(self, target):
        self.target = target

    def make_backend(self):
        return NixlBackend(
            NixlConfig(backend="UCX", address=self.target.address, staging=ByteSize(1 << 20)),
            real_context(),
        )

    def make_small_backend(self, nbytes):
        return None  # it lets the oldest values go

    crash = NixlTests.reopen
