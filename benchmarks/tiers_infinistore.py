"""InfiniStore over TCP: ours beside its own client, on the real server that a stub of libibverbs lets start here."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from limits.infinistore_raw import Copied, Raw  # type: ignore[import-not-found]
from lmcache_backend_infinistore import InfiniStoreBackend
from lmcache_backend_infinistore.config import InfiniStoreConfig
from lmcache_backend_infinistore.serving import START, InfiniServer, find_server
from tiers import Bar, Bench, Ours  # type: ignore[import-not-found]

from lmcache_core.storage.build import default_context
from lmcache_core.threads import DaemonExecutor


@contextmanager
def benches(options: argparse.Namespace) -> Iterator[list[Bench]]:
    """One server; nothing where it was not made, because only nights make it."""
    program = find_server()
    if program is None:
        print(f"infinistore: left out, no server here: {START}", file=sys.stderr)
        yield []
        return
    with tempfile.TemporaryDirectory() as folder, InfiniServer(program, Path(folder)) as server:
        config = InfiniStoreConfig(url=server.url)
        executor = DaemonExecutor("lmcache-infinistore", config.threads)
        context = replace(default_context("infinistore"), executor=executor)
        ours = Ours(InfiniStoreBackend(config, context))
        movers = [ours, Raw(server.port), Copied(server.port)]
        bars = [Bar(mover.name, 0.9, 0.9) for mover in movers[1:]]
        yield [Bench("infinistore tcp", movers, bars)]
