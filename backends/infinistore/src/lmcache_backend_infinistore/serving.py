"""A server of one's own, for tests, ``lmcache plugins verify``, the demo and benchmarks.

The real one opens an RDMA device before anything else. ``.ci/infinistore_server.py`` makes an environment in which it finds a
pretended one and serves TCP: for nightly tests, not for use.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from lmcache_backend_infinistore.link import Link
from lmcache_core.spi import Unsupported
from lmcache_core.testing.services import UNPACKED, Serving, free_port

START = ".venv/bin/python .ci/infinistore_server.py"
PROGRAM = "infinistore-stubbed"


def find_server() -> str | None:
    """The program that ``START`` made."""
    return shutil.which(PROGRAM, path=str(UNPACKED))


class InfiniServer(Serving):
    """One process on the loopback; takes 1 GiB."""

    def __init__(self, program: str, folder: Path, /) -> None:
        self.port = free_port()
        command = [
            program, "--host", "127.0.0.1", "--service-port", str(self.port), "--manage-port", str(free_port()),
            "--prealloc-size", "1", "--minimal-allocate-size", "16", "--dev-name", "stub0", "--link-type", "IB",
        ]  # fmt: skip
        super().__init__(command, folder=folder)

    @property
    def url(self) -> str:
        return f"infinistore://127.0.0.1:{self.port}"

    def ready(self) -> bool:
        try:
            link = Link(("127.0.0.1", self.port), 2.0)
            found = link.exists(b"nothing")
            link.close()
        except OSError:
            return False
        return not found


@functools.cache
def shared_server() -> InfiniServer:
    """One server for this process, stopped when it ends.

    Raises:
        Unsupported: it is not here.
    """
    program = find_server()
    if program is None:
        raise Unsupported(f"no {PROGRAM} here; {START}")
    folder = tempfile.mkdtemp(prefix="lmcache-infinistore-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return InfiniServer(program, Path(folder)).start()
