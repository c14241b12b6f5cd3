"""NIXL: ours beside a bare loop on the same plugin: files past the page cache, and another process's memory.

Files lie in the folder of ``LMCACHE_BENCH_DIR``, else in the work folder of the tree: a disk, not a memory file system.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from limits.nixl_loop import Files, Memory, address, lend  # type: ignore[import-not-found]  # it lies beside this file
from lmcache_backend_nixl import NixlBackend
from lmcache_backend_nixl.config import NixlConfig
from lmcache_backend_nixl.serving import TargetServer
from tiers import MIB, Bar, Bench, Ours  # type: ignore[import-not-found]

from lmcache_core.spi import Key, MemoryKind, Region
from lmcache_core.storage.build import default_context
from lmcache_core.threads import DaemonExecutor

LENT = 512 * MIB


class Registered(Ours):  # type: ignore[misc]
    """Memory is registered when it is first seen, as the manager does with its arena."""

    def __init__(self, config: NixlConfig) -> None:
        executor = DaemonExecutor("lmcache-nixl", config.threads)
        super().__init__(NixlBackend(config, replace(default_context("nixl"), executor=executor)))
        self._seen: set[int] = set()

    def _know(self, views: Sequence[memoryview]) -> None:
        first, last = address(views[0]), address(views[-1])
        if first not in self._seen:
            self._seen.add(first)
            nbytes = last - first + views[-1].nbytes
            self._do(self._backend.register(Region(MemoryKind.HOST, 0, first, nbytes)))

    def store(self, keys: Sequence[Key], values: Sequence[memoryview]) -> None:
        self._know(values)
        super().store(keys, values)

    def load(self, keys: Sequence[Key], into: Sequence[memoryview]) -> None:
        self._know(into)
        super().load(keys, into)


@contextmanager
def benches(options: argparse.Namespace) -> Iterator[list[Bench]]:
    """Files, then memory: two benches."""
    work = os.environ.get("LMCACHE_BENCH_DIR") or ".lmcache-work"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=work))).resolve()
        (folder / "raw").mkdir()
        files = [Registered(NixlConfig(path=str(folder / "ours"))), Files(folder / "raw")]
        target = stack.enter_context(TargetServer(folder, LENT))
        mine, theirs = multiprocessing.get_context("spawn").Pipe()
        lender = multiprocessing.get_context("spawn").Process(target=lend, args=(LENT, theirs))
        lender.start()
        stack.callback(lender.join)
        stack.callback(mine.send, "end")
        memory = [
            Registered(NixlConfig(backend="UCX", address=target.address)),
            Memory(*mine.recv()),
        ]
        bars = [Bar("raw NIXL", 0.9, 0.9)]
        yield [
            Bench("nixl POSIX direct", files, bars),
            Bench("nixl UCX", memory, bars, total=256 * MIB),
        ]
