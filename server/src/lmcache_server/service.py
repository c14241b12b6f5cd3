"""The service manager that started us: the sockets it passes, and what it is told (systemd's protocols)."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import MutableMapping
from contextlib import suppress

from lmcache_core.spi import ConfigError

_FIRST = 3
"""Number of the first passed descriptor."""
READY, STOPPING = "READY=1", "STOPPING=1"


def passed(env: MutableMapping[str, str] = os.environ, /) -> tuple[socket.socket, ...]:
    """Take the sockets that were passed to this process; none when they are for another one.

    Raises:
        ConfigError: one of them listens to nothing that the daemon speaks.
    """
    pid, count = env.pop("LISTEN_PID", ""), env.pop("LISTEN_FDS", "")
    env.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdigit():
        return ()
    found = []
    for descriptor in range(_FIRST, _FIRST + int(count)):
        os.set_inheritable(descriptor, False)
        try:
            sock = socket.socket(fileno=descriptor)
            listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError as error:
            raise ConfigError(f"descriptor {descriptor} was passed and is no socket") from error
        if not listens or sock.type != socket.SOCK_STREAM:
            raise ConfigError(f"socket {descriptor} was passed and is no listening stream")
        found.append(sock)
    return tuple(found)


def tell(state: str, env: MutableMapping[str, str] = os.environ, /) -> None:
    """Say something to the service manager; nothing when there is none."""
    path = env.get("NOTIFY_SOCKET")
    if path:
        # A manager that does not listen is no reason to wait, or to stop serving.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto(state.encode(), "\0" + path[1:] if path.startswith("@") else path)


def reloading() -> str:
    """What is said before a reload; ``READY`` is said after it."""
    return f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}"


async def beat(env: MutableMapping[str, str] = os.environ, /) -> None:
    """Say that the loop turns, as often as the service manager wants to hear it; ends at once if it does not."""
    pid, micros = env.get("WATCHDOG_PID", str(os.getpid())), env.get("WATCHDOG_USEC", "")
    if pid != str(os.getpid()) or not micros.isdigit():
        return
    while True:
        tell("WATCHDOG=1", env)
        await asyncio.sleep(int(micros) / 2e6)
