"""A master and a segment of one's own: for tests, ``lmcache plugins verify``, the demo and benchmarks."""

from __future__ import annotations

import atexit
import contextlib
import functools
import shutil
import tempfile
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from lmcache_backend_mooncake.config import MooncakeConfig
from lmcache_backend_mooncake.native import problem
from lmcache_core.spi import ByteSize, Unsupported
from lmcache_core.testing.services import Serving, free_port

START = "pip install mooncake-transfer-engine-non-cuda; apt-get install libibverbs1"


def find_server() -> str | None:
    """The folder of the wheel, whose programs run as they lie there; None where it cannot be used."""
    spec = find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations or problem() is not None:
        return None
    return str(next(iter(spec.submodule_search_locations)))


class Master(Serving):
    """Knows where values lie; ``flags`` such as ``--default_kv_lease_ttl=200``."""

    def __init__(self, package: str, folder: Path, /, *flags: str) -> None:
        self.port, self.admin = free_port(), free_port()
        command = [
            f"{package}/mooncake_master", "--rpc_address=127.0.0.1", f"--rpc_port={self.port}",
            "--metrics_host=127.0.0.1", f"--metrics_port={self.admin}", "--logtostderr", *flags,
        ]  # fmt: skip
        super().__init__(command, folder=folder)

    def ready(self) -> bool:
        return '"service_ready":true' in self.ask("/health")

    def ask(self, path: str) -> str:
        """What its HTTP port says; empty where it does not answer."""
        with contextlib.suppress(OSError, urllib.error.URLError):
            where = f"http://127.0.0.1:{self.admin}{path}"
            with urllib.request.urlopen(where, timeout=5.0) as answer:
                return str(answer.read().decode())
        return ""


class Provider(Serving):
    """Lends one segment to ``master``, or to the one elected at the address ``elected``."""

    def __init__(
        self, package: str, folder: Path, master: Master, nbytes: int, /, *, elected: str = ""
    ) -> None:
        self._master = master
        address = elected or f"127.0.0.1:{master.port}"
        command = [
            f"{package}/mooncake_client", "--host=127.0.0.1", f"--port={free_port()}",
            f"--global_segment_size={nbytes}", "--local_buffer_size=1MB", "--metadata_server=P2PHANDSHAKE",
            f"--master_server_address={address}", "--protocol=tcp", "--logtostderr",
        ]  # fmt: skip
        super().__init__(command, folder=folder)

    def start(self) -> Self:
        self._before = set(self._master.ask("/get_all_segments").split())
        return super().start()

    def ready(self) -> bool:
        return bool(set(self._master.ask("/get_all_segments").split()) - self._before)


class MooncakeServer:
    """A master, and a segment on the loopback.

    Args:
        package: what ``find_server`` found.
        folder: for logs.
        nbytes: of the segment, all of it touched at the start.
        flags: of the master.
    """

    def __init__(self, package: str, folder: Path, /, *flags: str, nbytes: int = 512 << 20) -> None:
        for name in ("master", "provider"):
            (folder / name).mkdir(exist_ok=True)
        self.master = Master(package, folder / "master", *flags)
        self.provider = Provider(package, folder / "provider", self.master, nbytes)

    @property
    def url(self) -> str:
        return f"mooncakestore://127.0.0.1:{self.master.port}"

    def config(self, **options: Any) -> MooncakeConfig:
        """Options of a tier here."""
        admin = f"127.0.0.1:{self.master.admin}"
        given: dict[str, Any] = {"url": self.url, "admin": admin, "buffer": ByteSize(1 << 20)}
        return MooncakeConfig(**(given | options))

    def start(self) -> Self:
        self.master.start()
        self.provider.start()
        return self

    def kill(self) -> None:
        self.provider.kill()
        self.master.kill()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.kill()


@functools.cache
def shared_server() -> MooncakeServer:
    """One for this process, stopped when it ends.

    Raises:
        Unsupported: the programs are not here.
    """
    package = find_server()
    if package is None:
        raise Unsupported(f"no Mooncake here: {problem()}; {START}")
    folder = tempfile.mkdtemp(prefix="lmcache-mooncake-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return MooncakeServer(package, Path(folder)).start()
