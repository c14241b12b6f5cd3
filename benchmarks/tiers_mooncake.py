"""Mooncake over TCP: ours beside bare batches of its client, on one master and one segment."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from limits.mooncake_raw import Raw  # type: ignore[import-not-found]  # it lies beside this file
from lmcache_backend_mooncake import MooncakeBackend
from lmcache_backend_mooncake.native import problem
from lmcache_backend_mooncake.serving import START, MooncakeServer, find_server
from tiers import Bar, Bench, Ours  # type: ignore[import-not-found]

from lmcache_core.storage.build import default_context
from lmcache_core.threads import DaemonExecutor


@contextmanager
def benches(options: argparse.Namespace) -> Iterator[list[Bench]]:
    """One server, two clients in this process."""
    package = find_server()
    if package is None:
        raise SystemExit(f"no Mooncake here: {problem()}; {START}")
    with (
        tempfile.TemporaryDirectory() as folder,
        MooncakeServer(package, Path(folder), nbytes=1 << 30) as server,
    ):
        config = server.config(prefix="", timeout=20.0)
        executor = DaemonExecutor("lmcache-mooncake", config.threads)
        context = replace(default_context("mooncake"), executor=executor)
        ours, raw = Ours(MooncakeBackend(config, context)), Raw(config)
        yield [Bench("mooncake tcp", [ours, raw], [Bar(raw.name, 0.9, 0.9)])]
