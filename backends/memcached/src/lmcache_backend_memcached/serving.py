"""A server of one's own, on a unix socket: for tests and ``lmcache plugins verify``."""

import atexit
import functools
import shutil
import socket
import tempfile
from pathlib import Path

from lmcache_core.spi import Unsupported
from lmcache_core.testing.services import Serving, find_program

START = "apt-get install memcached"


class MemcachedServer(Serving):
    """One process; ``flags`` such as ``("-m", "64")``."""

    def __init__(self, program: str, folder: Path, /, *flags: str) -> None:
        self.path = str(folder / "s")  # the path of a socket may not be long
        command = [program, "-u", "root", "-s", self.path, "-m", "256", "-I", "16m", *flags]
        super().__init__(command, folder=folder)

    def ready(self) -> bool:
        try:
            return self.command(b"version").startswith(b"VERSION")
        except OSError:
            return False

    def command(self, line: bytes) -> bytes:
        """Say one line behind everybody's back; the reply up to its last line, raw."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5)
            sock.connect(self.path)
            sock.sendall(line + b"\r\n")
            reply = b""
            while (
                not reply.endswith((b"END\r\n", b"STORED\r\n", b"D\r\n"))
                and b"VERSION" not in reply
            ):
                reply += sock.recv(65536)
            return reply


@functools.cache
def shared_server() -> MemcachedServer:
    """One server for this process, stopped when it ends.

    Raises:
        Unsupported: it is not here.
    """
    program = find_program("memcached")
    if program is None:
        raise Unsupported(f"no memcached here; {START}")
    folder = tempfile.mkdtemp(prefix="lmcache-memcached-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return MemcachedServer(program, Path(folder)).start()
