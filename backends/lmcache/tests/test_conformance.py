"""The backend keeps the laws, in place and streamed, against a real daemon."""

import pytest
from lmcache_backend_lmcache import LMCacheBackend
from lmcache_backend_lmcache.config import LMCacheConfig

from lmcache_core import ops
from lmcache_core.spi import Secret
from lmcache_core.testing.backend import BackendTests
from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.wire.client import DaemonClient
from tests.wire.certificates import Authority
from tests.wire.daemons import Daemon, free_port

TOKEN = "secret"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory, authority):
    certificate, private = authority.issue()
    with Daemon(
        tmp_path_factory.mktemp("d"), "--arena-mode", "shared-rw",
        "--ssl-certfile", certificate, "--ssl-keyfile", private, port=free_port(), token=TOKEN,
    ) as found:  # fmt: skip
        yield found


class OnADaemon(BackendTests):
    own_threads = ("lmcache-daemon-client",)  # reconnects and tells what has ended; daemonic

    @pytest.fixture(autouse=True)
    def _daemon(self, daemon):
        self.daemon = daemon
        self.watch = DaemonClient(f"unix://{daemon.path}")
        yield
        self.watch.close()
        del (
            self.watch
        )  # a closed client maps what leases of it may still show, and pytest keeps this object

    def reopen(self, store):
        return LMCacheBackend(store.config, real_context())

    def peek(self, key):
        loaded = self.watch.load([key], None)
        value = loaded.leases[0].view.tobytes() if loaded.leases else None
        self.watch.release(loaded.leases)
        return value

    def poke(self, key, value):
        (held,) = self.watch.reserve([(key, len(value))], None)
        held.view[:] = value
        assert self.watch.commit_batch([held], [ops.digest(value, 0)]) == [True]


class TestInPlace(OnADaemon):
    def make_backend(self):
        return LMCacheBackend(LMCacheConfig(f"unix://{self.daemon.path}"), real_context())


class TestStreamed(OnADaemon):
    """Under TLS, which proves what arrived: on plain TCP a daemon keeps whole frames only, and laws store any bytes."""

    @pytest.fixture(autouse=True)
    def _far(self, monkeypatch, authority):
        self.authority = authority
        # A client of another node finds no such socket there.
        monkeypatch.setattr("lmcache_core.wire.connection.Address", _Elsewhere)

    def make_backend(self):
        url = f"tls://127.0.0.1:{self.daemon.port}?ca={self.authority.file}"
        return LMCacheBackend(LMCacheConfig(url, Secret(TOKEN)), real_context())


def _Elsewhere(path):
    from lmcache_core.wire.address import Address

    return Address(path=f"{path}.of-another-node")
