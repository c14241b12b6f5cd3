"""A daemon and its clients inside a simulation: the product's own code, with its clock, threads and sockets replaced.

What a module of the product calls ``socket``, ``time``, ``threading``, ``random`` and ``secrets`` is replaced for
as long as the simulation runs; nothing else is. So every line between an engine and the storage manager runs as
shipped, and one seed is one history.
"""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from lmcache_server import connection, daemon, engines, greeting, session

from lmcache_core.config import Effective, load
from lmcache_core.memory.arena import Access
from lmcache_core.spi import Secret
from lmcache_core.storage.manager import StorageManager
from lmcache_core.testing.simulation import EPOCH, SimLoop
from lmcache_core.wire import connection as wire_connection
from lmcache_core.wire import greeting as wire_greeting
from lmcache_core.wire import helper as wire_helper
from lmcache_core.wire import link as wire_link
from tests.simulation.network import Network
from tests.simulation.sockets import SimSocket
from tests.simulation.threads import sleep, threading_of

TOKEN = "a token of the simulation"


class SimProcess:
    """``memory.leases.OwnerProcess`` of a simulated process."""

    def __init__(self, network: Network, pidfd: int) -> None:
        self.network, self.number = network, pidfd

    def fileno(self) -> int:
        return self.number

    def gone(self) -> bool:
        return self.network.gone(self.number)

    def close(self) -> None: ...

    def discard(self) -> None: ...


@cache
def effective() -> Effective:
    return load(env={}, flags={"chunk_size": 4})


class SimDaemon(daemon.Daemon):
    """A daemon without a process of its own: ``attach`` and ``end`` replace ``run``.

    ``begin``: a client may connect from now on.
    """

    def __init__(self, network: Network, access: Access) -> None:
        options = daemon.Options(path="/sim", port=1, token=Secret(TOKEN), access=access, drain=2.0)
        super().__init__(effective(), options)
        self.network = network
        self.now = network.loop.time
        self.broken: list[str] = []
        self.log = SimpleNamespace(  # type: ignore[assignment]
            info=lambda *_: None,
            warning=lambda *_: None,
            error=self._broke,
            exception=self._broke,
        )

    def _broke(self, text: str, *args: Any, **_: Any) -> None:
        """A request failed as none may; kept with what happened."""
        self.broken.append(f"{text % args}: {traceback.format_exc(limit=-6)}")

    def attach(self, manager: StorageManager) -> None:
        super().attach(manager)
        self.network.accept = self.accept

    def accept(self, sock: SimSocket) -> None:
        connection.Connection(self, sock, local=sock.family == wire_link.socket.AF_UNIX)


@contextmanager
def simulated(loop: SimLoop, network: Network, source: random.Random) -> Iterator[None]:
    """Put the simulation under the modules of daemon and client."""

    def tokens(count: int) -> bytes:
        return source.randbytes(count)

    clock = SimpleNamespace(
        monotonic=loop.time, perf_counter=lambda: 0.0, time=lambda: EPOCH + loop.time(), sleep=sleep
    )
    secrets = SimpleNamespace(token_bytes=tokens, randbits=source.getrandbits)
    threads = threading_of(loop)
    # A pidfd of this process is real, and closed by whoever gets it.
    system = SimpleNamespace(getpid=os.getpid, close=os.close, pidfd_open=lambda pid: os.dup(0))
    replaced: list[tuple[Any, str, Any]] = [
        (wire_link, "socket", network.socket_module()),
        (wire_link, "select", network.select_module()),
        (wire_link, "time", clock),
        (wire_connection, "time", clock),
        (wire_connection, "threading", threads),
        (wire_connection, "random", source),
        (wire_connection, "watch", lambda client: None),
        (wire_greeting, "os", system),
        (wire_helper, "time", clock),
        (connection, "time", clock),
        (daemon, "secrets", secrets),
        (engines, "time", clock),
        (greeting, "secrets", secrets),
        (greeting, "OwnerProcess", lambda pidfd, name: SimProcess(network, pidfd)),
        (session, "secrets", secrets),
    ]
    with ExitStack() as stack:
        for module, name, stand_in in replaced:
            stack.enter_context(patch.object(module, name, stand_in))
        yield
