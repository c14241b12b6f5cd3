"""A process whose disk hangs for ever: prints ``opened``, ``timeout`` and ``exit``, and ends.

hanging.py simulated CALL           a simulated disk on which one system call never returns
hanging.py mount FOLDER PID         a real mount, served by a process that is stopped
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lmcache_backend_disk import DiskBackend, FsBackend
from lmcache_backend_disk.config import DiskConfig, Sync

from lmcache_core.spi import AbstractBackend, Key, Load, Store
from lmcache_core.testing.contexts import test_context
from lmcache_core.testing.files import SimFiles

KEY, OTHER = (Key(bytes(32), bytes([number]) * 32, 0) for number in (1, 2))


def stop(server: int) -> None:
    """Stop a process, and return when it is: what it has read before, nobody can give up waiting for."""
    os.kill(server, signal.SIGSTOP)
    while Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)


async def main(store: AbstractBackend, hang: Callable[[], object]) -> None:
    await store.open()
    await store.store([Store(KEY, (memoryview(b"value"),))])
    sys.stdout.write("opened\n")
    hang()
    verbs = [
        asyncio.ensure_future(store.lookup([KEY, OTHER])),
        asyncio.ensure_future(store.load([Load(KEY, (memoryview(bytearray(9)),))])),
        asyncio.ensure_future(store.store([Store(OTHER, (memoryview(b"other"),))])),
    ]
    _, pending = await asyncio.wait(verbs, timeout=0.5)
    assert pending, "nothing hangs"
    closing = asyncio.ensure_future(store.aclose())
    await asyncio.wait([closing], timeout=0.2)
    assert not closing.done(), "closed although a call may still touch memory"
    sys.stdout.write("timeout\n")


def run() -> None:
    mode, *rest = sys.argv[1:]
    if mode == "simulated":
        files = SimFiles()
        config = DiskConfig(path="/kv", fan_out=16, sync=Sync.DURABLE)
        store: AbstractBackend = DiskBackend(config, test_context(files=files))
        loop = asyncio.new_event_loop()
        loop.run_until_complete(main(store, lambda: files.hang(rest[0])))
    else:
        folder, server = rest
        store = FsBackend(DiskConfig(path=folder, fan_out=16), test_context())
        loop = asyncio.new_event_loop()
        loop.run_until_complete(main(store, lambda: stop(int(server))))
    # As a host with a deadline does: the loop is left with its hung tasks, threads are daemonic.
    sys.stdout.write("exit\n")


run()
