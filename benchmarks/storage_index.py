"""What the index of a pool costs: bytes per chunk, time per chunk from 1 k to 1 M chunks, rights per second.

    python benchmarks/storage_index.py [--quick] [--json]

The pool is real, with its default policy, on memory that is never touched. Batches hold 391 chunks (100 k tokens),
their keys are fresh objects in random order, so that neither hashes nor lines of the processor's cache are warm.
Every time is the median of the batches. Exit status 1: a bar was missed.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from lmcache_core.memory.arena import PAGE, Access, Arena
from lmcache_core.memory.leases import Held
from lmcache_core.memory.pool import Pool
from lmcache_core.policies.lru import LRU, LRUConfig
from lmcache_core.spi import Key, MemoryOptions

SIZES = (1_000, 10_000, 100_000, 1_000_000)
BATCH = 391
"""Chunks of 100 k tokens."""
SPACE = hashlib.sha256(b"space").digest()
IDENTITY = bytes(16)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; lower is better where there is a bar, except for rates."""

    name: str
    value: float
    unit: str
    bar: float | None = None

    @property
    def good(self) -> bool:
        if self.bar is None:
            return True
        return self.value >= self.bar if self.unit == "/s" else self.value <= self.bar


def key(number: int) -> Key:
    return Key(SPACE, hashlib.sha256(number.to_bytes(8, "little")).digest(), 0)


def resident_nbytes() -> int:
    """Memory of this process now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def make_pool(chunks: int) -> Pool:
    capacity = chunks * PAGE
    arena = Arena(capacity, MemoryOptions(populate=False), access=Access.PRIVATE, overcommit=True)
    return Pool(arena, LRU(LRUConfig(), capacity))


def fill(pool: Pool, start: int, stop: int) -> None:
    for first in range(start, stop, BATCH):
        wants = [(key(number), PAGE) for number in range(first, min(first + BATCH, stop))]
        granted = [each for each in pool.reserve(wants, "fill") if isinstance(each, Held)]
        pool.commit_batch(granted, [IDENTITY] * len(granted))


def per_chunk(function: Callable[[list[Key]], object], chunks: int, laps: int) -> float:
    """Median microseconds per chunk over batches of fresh keys."""
    chance = random.Random(0)
    times = []
    for _ in range(laps):
        batch = [key(chance.randrange(chunks)) for _ in range(BATCH)]
        begun = time.perf_counter()
        function(batch)
        times.append((time.perf_counter() - begun) / BATCH * 1e6)
    return statistics.median(times)


def measure(sizes: tuple[int, ...], laps: int) -> list[Row]:
    rows = []
    smallest = 0.0
    for chunks in sizes:
        gc.collect()
        before = resident_nbytes()
        pool = make_pool(chunks)
        fill(pool, 0, chunks)
        gc.collect()
        nbytes = (resident_nbytes() - before) / chunks
        last = chunks == sizes[-1]
        gc.disable()  # as a daemon does: its long-lived objects are frozen
        index = pool._ledger.index

        def right(batch: list[Key], pool: Pool = pool) -> None:
            pool.release(pool.lease(batch, "reader"))

        lookup = per_chunk(index.slots_of, chunks, laps)
        smallest = smallest or lookup
        rows.append(
            Row(f"lookup, {chunks:,} chunks", lookup, "us per chunk", 1.5 if last else None)
        )
        rows.append(
            Row(
                f"lookup, lease, release, {chunks:,}",
                per_chunk(right, chunks, laps),
                "us per chunk",
            )
        )
        if last:
            rows.append(Row(f"lookup, {chunks:,} over {sizes[0]:,}", lookup / smallest, "x", 8.0))
            rows.append(
                Row(f"lookup, lease, release of {BATCH}", rows[-2].value * BATCH / 1e3, "ms", 0.6)
            )
            rows.append(Row("index, policy and generations", nbytes, "bytes per chunk", 300))
            begun = time.perf_counter()
            stores = 50 * BATCH
            fill(pool, chunks, chunks + stores)
            rate = stores / (time.perf_counter() - begun)
            rows.append(Row("reserve with eviction, commit", rate, "/s"))
        gc.enable()
        pool.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="at most 100 k chunks")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = measure(SIZES[:3] if options.quick else SIZES, 60 if options.quick else 200)
    if options.json:
        print(json.dumps([asdict(row) | {"good": row.good} for row in rows]))
    else:
        for row in rows:
            bar = "" if row.bar is None else f"bar {row.bar:g} {'met' if row.good else 'MISSED'}"
            print(f"{row.name:38} {row.value:12.3f} {row.unit:16} {bar}")
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
