"""A target of one's own: for tests, the demo and benchmarks."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from lmcache_core.testing.services import Serving, free_port

START = "pip install nixl-cu12"
RUN = "from lmcache_backend_nixl.command import app; app()"


class TargetServer(Serving):
    """One ``lmcache nixl-target`` on the loopback.

    Args:
        folder: for its log.
        nbytes: memory it lends.
        flags: further ones of the command.
    """

    def __init__(self, folder: Path, nbytes: int = 64 << 20, /, *flags: str) -> None:
        self.port = free_port()
        super().__init__(
            [sys.executable, "-c", RUN, "--size", str(nbytes), "--listen", self.address, *flags],
            folder=folder,
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def ready(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True
