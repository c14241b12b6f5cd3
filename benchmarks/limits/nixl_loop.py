"""What NIXL itself gives: one thread that posts a batch and asks about it until it has ended; movers of ``benchmarks/tiers.py``.

The same files and the same memory as ours, but no names to publish, no questions about what is there, and no checks.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmcache_core.spi import Key

nixl: Any = importlib.import_module("nixl_cu12._bindings")


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Loop:
    """One agent with one plugin; memory is registered when it is first seen, as a cache does with its arena."""

    name = "raw NIXL"
    fills = True

    def __init__(self, plugin: str, params: dict[str, str] | None = None) -> None:
        config = nixl.nixlAgentConfig()
        config.useProgThread = False
        self.me = f"raw-{secrets.token_hex(4)}"
        self.agent = nixl.nixlAgent(self.me, config)
        self.backend = self.agent.createBackend(plugin, params or {})
        self._seen: set[tuple[int, int]] = set()

    def know(self, views: Sequence[memoryview]) -> None:
        """Register the block that the views lie in."""
        first, last = address(views[0]), address(views[-1])
        block = (first, last - first + views[-1].nbytes)
        if block not in self._seen:
            self._seen.add(block)
            self.register(nixl.DRAM_SEG, [(*block, 0, "")])

    def register(self, kind: Any, places: list[tuple[int, int, int, str]]) -> Any:
        listed = nixl.nixlRegDList(kind, places)
        self.agent.registerMem(listed, [self.backend])
        return listed

    def move(
        self,
        operation: Any,
        pairs: Sequence[tuple[memoryview, tuple[int, int, int]]],
        kind: Any,
        peer: str,
    ) -> None:
        """One request for each value, all at once."""
        handles = []
        for view, place in pairs:
            local = nixl.nixlXferDList(nixl.DRAM_SEG, [(address(view), view.nbytes, 0)])
            other = nixl.nixlXferDList(kind, [place])
            handles.append(
                self.agent.createXferReq(operation, local, other, peer, "", [self.backend])
            )
            self.agent.postXferReq(handles[-1])
        while handles:
            running = []
            for handle in handles:
                if self.agent.getXferStatus(handle) == nixl.NIXL_IN_PROG:
                    running.append(handle)
                else:
                    self.agent.releaseXferReq(handle)
            handles = running

    def clear(self, keys: Sequence[Key]) -> None: ...
    def close(self) -> None: ...


class Files(Loop):
    """A file for each value, opened with ``O_DIRECT``."""

    def __init__(self, folder: Path, params: dict[str, str] | None = None) -> None:
        super().__init__("POSIX", params)
        self._folder = folder

    def _paths(self, keys: Sequence[Key]) -> list[str]:
        return [f"{self._folder}/{key.digest.hex()}" for key in keys]

    def _all(
        self, operation: Any, flags: int, keys: Sequence[Key], views: Sequence[memoryview]
    ) -> None:
        self.know(views)
        files = [os.open(path, flags | os.O_DIRECT, 0o600) for path in self._paths(keys)]
        sizes = [view.nbytes for view in views]
        known = self.register(
            nixl.FILE_SEG, [(0, nbytes, fd, "") for nbytes, fd in zip(sizes, files, strict=True)]
        )
        places = [(0, nbytes, fd) for nbytes, fd in zip(sizes, files, strict=True)]
        self.move(operation, list(zip(views, places, strict=True)), nixl.FILE_SEG, self.me)
        self.agent.deregisterMem(known, [self.backend])
        for fd in files:
            os.close(fd)

    def store(self, keys: Sequence[Key], values: Sequence[memoryview]) -> None:
        self._all(nixl.NIXL_WRITE, os.O_RDWR | os.O_CREAT, keys, values)

    def load(self, keys: Sequence[Key], into: Sequence[memoryview]) -> None:
        self._all(nixl.NIXL_READ, os.O_RDONLY, keys, into)

    def clear(self, keys: Sequence[Key]) -> None:
        for path in self._paths(keys):
            os.unlink(path)


class Memory(Loop):
    """Fixed places in the memory of a process that lends it.

    Args:
        peer, description, start: of that process.
    """

    def __init__(self, peer: str, description: bytes, start: int) -> None:
        super().__init__("UCX")
        self._peer, self._start = peer, start
        self.agent.loadRemoteMD(description)

    def _all(self, operation: Any, views: Sequence[memoryview]) -> None:
        self.know(views)
        at, pairs = self._start, []
        for view in views:
            pairs.append((view, (at, view.nbytes, 0)))
            at += view.nbytes
        self.move(operation, pairs, nixl.DRAM_SEG, self._peer)

    def store(self, keys: Sequence[Key], values: Sequence[memoryview]) -> None:
        self._all(nixl.NIXL_WRITE, values)

    def load(self, keys: Sequence[Key], into: Sequence[memoryview]) -> None:
        self._all(nixl.NIXL_READ, into)


def lend(nbytes: int, wire: Any) -> None:
    """A process that only lends memory; ends with its parent's pipe."""
    import mmap

    loop = Loop("UCX")
    block = memoryview(mmap.mmap(-1, nbytes))
    for at in range(0, nbytes, 4096):
        block[at] = 1
    loop.know([block])
    wire.send((loop.me, bytes(loop.agent.getLocalMD()), address(block)))
    while not wire.poll(0.0002):
        loop.agent.getNotifs({})
