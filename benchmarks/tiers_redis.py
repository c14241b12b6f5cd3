"""Redis over a unix socket and over TCP: ours, a bare socket loop, redis-py with hiredis, and LMCache 0.5.6's native client.

The peer is measured by its own ``bench l2``, which stores rounds of keys that the server has no memory for yet and loads them
afterwards; ours and the bare loop move the same rounds then, and the server is emptied after each.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import redis
from limits.peer import ROUNDS, rates_of  # type: ignore[import-not-found]  # it lies beside this file
from limits.redis_socket import Scattered, Socket  # type: ignore[import-not-found]
from lmcache_backend_redis import RedisBackend
from lmcache_backend_redis.config import RedisConfig
from lmcache_backend_redis.serving import START, RedisServer, find_server
from tiers import MIB, SPACE, Bar, Bench, Mover, Ours  # type: ignore[import-not-found]

from lmcache_core.spi import Key
from lmcache_core.storage.build import default_context
from lmcache_core.testing.services import free_port
from lmcache_core.threads import DaemonExecutor


class RedisPy:
    """The client as people use it, with its C parser."""

    name, fills = "redis-py + hiredis", True

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)

    def store(self, keys: Sequence[Key], values: Sequence[memoryview]) -> None:
        for key, value in zip(keys, values, strict=True):
            assert self._client.set(key.text, value)

    def load(self, keys: Sequence[Key], into: Sequence[memoryview]) -> None:
        for key, view in zip(keys, into, strict=True):
            view[:] = self._client.get(key.text)

    def clear(self, keys: Sequence[Key]) -> None:
        self._client.unlink(*(key.text for key in keys))

    def close(self) -> None:
        self._client.close()


class Peer:
    """``lmcache bench l2`` of LMCache 0.5.6 on its native client: one run stores and loads, and times both."""

    name, fills = "LMCache 0.5.6 resp", False

    def __init__(self, command: str, server: RedisServer) -> None:
        self._command, self._server = command, server
        self._adapter = {"type": "resp", "host": "127.0.0.1", "port": server.port}
        self._load = 0.0

    def store(self, keys: Sequence[Key], values: Sequence[memoryview]) -> float:
        nbytes, count = values[0].nbytes, len(values)
        rates = rates_of(self._command, self._adapter, nbytes=nbytes, count=count)
        self._load = nbytes * count / rates["load"]
        return float(nbytes * count / rates["store"])

    def load(self, keys: Sequence[Key], into: Sequence[memoryview]) -> float:
        return self._load

    def clear(self, keys: Sequence[Key]) -> None:
        # It leaves its values, by the same names in every run: overwriting takes the server no new memory.
        self._server.command("FLUSHALL", "SYNC")

    def close(self) -> None:
        """It has ended."""


class Rounds:
    """Another mover, in the peer's way: a round to warm up, then as many as it counts, and the mean of their rates."""

    def __init__(self, mover: Mover) -> None:
        self.name, self.fills, self._mover = mover.name, mover.fills, mover
        self.close = mover.close

    def store(self, keys: Sequence[Key], values: Sequence[memoryview]) -> float:
        return self._seconds(self._mover.store, keys, values)

    def load(self, keys: Sequence[Key], into: Sequence[memoryview]) -> float:
        return self._seconds(self._mover.load, keys, into)

    def clear(self, keys: Sequence[Key]) -> None:
        for number in range(ROUNDS + 1):
            self._mover.clear(_round(keys, number))

    def _seconds(
        self, move: Callable[..., object], keys: Sequence[Key], views: Sequence[memoryview]
    ) -> float:
        spent = []
        for number in range(ROUNDS + 1):
            names = _round(keys, number)
            began = time.perf_counter()
            move(names, views)
            spent.append(time.perf_counter() - began)
        return statistics.harmonic_mean(spent[1:])


def _round(keys: Sequence[Key], number: int) -> list[Key]:
    return [Key(SPACE, hashlib.sha256(b"%d" % number + key.digest).digest()) for key in keys]


def ours(url: str) -> Mover:
    config = RedisConfig(url=url, prefix="")
    executor = DaemonExecutor("lmcache-redis", config.threads)
    return Ours(RedisBackend(config, replace(default_context("redis"), executor=executor)))


@contextmanager
def benches(options: argparse.Namespace) -> Iterator[list[Bench]]:
    """One server, two ways to it."""
    program = find_server("redis-server")
    if program is None:
        raise SystemExit(f"redis-server is missing: {START}")
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(program, Path(folder), port=free_port()) as server,
    ):
        address = ("127.0.0.1", server.port)
        bars = (
            Bar("bare socket", 0.8, 0.8),
            Bar("bare, scattered", 0.8, 0.8),
            Bar("redis-py + hiredis", 2.5, 2.5, limit="bare socket"),
        )
        made = []
        for name, url, place in (
            ("redis unix", server.url, server.path),
            ("redis tcp", server.tcp, address),
        ):
            movers: list[Mover] = [ours(url), Socket(place), Scattered(place, "bare, scattered")]
            if find_spec("hiredis"):
                movers.append(RedisPy(url))
            else:  # without its parser in C this would compare with less
                print(f"{name}: left out redis-py: pip install hiredis", file=sys.stderr)
            made.append(Bench(name, movers, bars))
        if options.peer:
            pair = [Rounds(ours(server.tcp)), Rounds(Socket(address)), Peer(options.peer, server)]
            bar = Bar("LMCache 0.5.6 resp", 1.0, 1.0)
            made.append(Bench("redis peer", pair, (bar,), sizes=(4 * MIB,), total=64 * MIB))
        yield made
