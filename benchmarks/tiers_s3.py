"""SeaweedFS: ours beside boto3, obstore, awscrt, OpenDAL and bare http.client, each in its best parallel mode."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from limits.s3_clients import clients  # type: ignore[import-not-found]  # it lies beside this file
from lmcache_backend_s3 import S3Backend
from lmcache_backend_s3.serving import BUCKET, KEYS, START, SeaweedServer, find_server
from tiers import Bar, Bench, Ours  # type: ignore[import-not-found]

from lmcache_core.storage.build import default_context
from lmcache_core.threads import DaemonExecutor


@contextmanager
def benches(options: argparse.Namespace) -> Iterator[list[Bench]]:
    """One server, every client that is installed (``pip install boto3 obstore awscrt opendal``)."""
    program = find_server()
    if program is None:
        raise SystemExit(f"weed is missing: {START}")
    with tempfile.TemporaryDirectory() as folder, SeaweedServer(program, Path(folder)) as server:
        config = server.config("ours", timeout=60.0, part_size=16 << 20)
        executor = DaemonExecutor("lmcache-s3", config.threads)
        ours = Ours(S3Backend(config, replace(default_context("s3"), executor=executor)))
        others = clients(server.endpoint, BUCKET, *KEYS)
        bars = [Bar(other.name, 0.9, 0.9, cpu=1.0) for other in others]
        yield [Bench("s3", [ours, *others], bars)]
