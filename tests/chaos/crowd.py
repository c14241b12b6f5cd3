"""Clients that never stop: every byte they get is compared, every call is timed."""

from __future__ import annotations

import logging
import math
import multiprocessing
import random
import time
from typing import Any

from lmcache_core.spi import Refusal
from lmcache_core.wire.client import DaemonClient
from tests.wire.daemons import ROOM, check_leases, fill, key

SIZES = (4096, 16_384, 65_536)
VALUES = 3000
TIMEOUT = 1.0
BUCKETS = 96


def bucket(seconds: float) -> int:
    """Four buckets for each doubling, from 8 µs on."""
    return min(BUCKETS - 1, max(0, int(4 * math.log2(max(seconds, 8e-6) / 8e-6))))


def upper(at: int) -> float:
    """Longest time in a bucket."""
    return 8e-6 * 2 ** ((at + 1) / 4)


def hammer(path: str, seed: int, shared: dict[str, Any]) -> None:
    """Body of a client process."""
    choice = random.Random(seed)
    logging.getLogger("lmcache").setLevel(logging.CRITICAL)
    client = DaemonClient(f"unix://{path}", timeout=TIMEOUT)
    while not shared["stop"].is_set():
        number = choice.randrange(VALUES)
        run = range(number, number + choice.randrange(1, 9))
        keys = [key(each) for each in run]
        what = choice.random()
        verb = "lookup" if what < 0.2 else "load" if what < 0.7 else "store"
        begun = time.monotonic()
        served = 0
        if verb == "lookup":
            client.lookup(keys)
        elif verb == "load":
            loaded = client.load(keys, None, deadline=begun + TIMEOUT)
            served = len(loaded.leases)
            check_leases(loaded.leases, run[:served])
            client.release(loaded.leases)
        else:
            nbytes = ROOM + choice.choice(SIZES)
            held = client.reserve([(each, nbytes) for each in keys], None)
            good = [(n, h) for n, h in zip(run, held, strict=True) if not isinstance(h, Refusal)]
            if good:
                client.commit_batch([h for _, h in good], [fill(h, n) for n, h in good])
        spent = time.monotonic() - begun
        with shared["lock"]:
            shared[verb][bucket(spent)] += 1
            shared["served"].value += served
            shared["worst"].value = max(shared["worst"].value, spent)
        if client.home is None:
            time.sleep(0.001)  # whoever misses computes, and that takes time
    client.close()


class Crowd:
    """Client processes under one daemon, and what they saw."""

    def __init__(self, path: str, clients: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._shared: dict[str, Any] = {
            "stop": context.Event(), "lock": context.Lock(),
            "served": context.Value("q", 0, lock=False), "worst": context.Value("d", 0.0, lock=False),
        }  # fmt: skip
        for verb in ("lookup", "load", "store"):
            self._shared[verb] = context.Array("q", BUCKETS, lock=False)
        self.processes = [
            context.Process(target=hammer, args=(path, seed, self._shared))
            for seed in range(clients)
        ]
        for process in self.processes:
            process.start()

    @property
    def good(self) -> bool:
        """Nobody has seen a wrong byte or an exception."""
        return all(process.is_alive() for process in self.processes)

    @property
    def served(self) -> int:
        """Values read and compared so far."""
        return int(self._shared["served"].value)

    def worst(self) -> float:
        """The longest call since this was asked last."""
        with self._shared["lock"]:
            found = float(self._shared["worst"].value)
            self._shared["worst"].value = 0.0
        return found

    def counts(self, verb: str) -> list[int]:
        with self._shared["lock"]:
            return list(self._shared[verb])

    def end(self) -> bool:
        self._shared["stop"].set()
        for process in self.processes:
            process.join(30)
        return all(process.exitcode == 0 for process in self.processes)


def percentile(counts: list[int], share: float) -> float:
    """Upper bound of the time that this share of the calls took at most."""
    rest = share * sum(counts)
    for at, count in enumerate(counts):
        rest -= count
        if rest <= 0 and count:
            return upper(at)
    return 0.0
