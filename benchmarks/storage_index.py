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
from lmcache_core.memory.index import Index
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


def per_chunk(
    function: Callable[[list[Key]], object], draw: Callable[[], range | list[int]], laps: int
) -> float:
    """Median microseconds per chunk over batches of fresh keys."""
    times = []
    for _ in range(laps):
        batch = [key(number) for number in draw()]
        begun = time.perf_counter()
        function(batch)
        times.append((time.perf_counter() - begun) / BATCH * 1e6)
    return statistics.median(times)


def measure(sizes: tuple[int, ...], laps: int) -> list[Row]:
    rows = []
    small = make_pool(sizes[0])
    fill(small, 0, sizes[0])
    for chunks in sizes:
        gc.collect()
        before = resident_nbytes()
        pool = make_pool(chunks)
        fill(pool, 0, chunks)
        gc.collect()
        nbytes = (resident_nbytes() - before) / chunks
        gc.disable()  # as a daemon does: what lives long is frozen
        chance = random.Random(0)

        def anywhere(chunks: int = chunks, chance: random.Random = chance) -> list[int]:
            return [chance.randrange(chunks) for _ in range(BATCH)]

        def prefix(chunks: int = chunks, chance: random.Random = chance) -> range:
            start = chance.randrange(max(1, chunks // BATCH - 1)) * BATCH
            return range(start, start + BATCH)

        def rights(batch: list[Key], pool: Pool = pool) -> None:
            pool.release(pool.lease(batch, "reader"))

        last, name = chunks == sizes[-1], f"{chunks:,} chunks"
        lookup = per_chunk(pool.index.slots_of, anywhere, laps)
        apart, together = (per_chunk(rights, draw, laps) for draw in (anywhere, prefix))
        rows.append(Row(f"lookup in {name}", lookup, "us/chunk", 1.5 if last else None))
        rows.append(Row(f"lookup, lease, release in {name}", apart, "us/chunk"))
        if last:
            rows.append(
                Row(
                    f"lookup in {name} over {sizes[0]:,}",
                    ratio(pool, chunks, small, sizes[0], laps),
                    "x",
                    8.0,
                )
            )
            rows.append(
                Row(
                    f"lookup, lease, release of a stored prefix of {BATCH}",
                    together * BATCH / 1e3,
                    "ms",
                    0.6,
                )
            )
            rows.append(Row("index", index_nbytes(chunks), "bytes/chunk", 300))
            rows.append(Row("index, slabs, generations, policy", nbytes, "bytes/chunk", 300))
            stores = 50 * BATCH
            begun = time.perf_counter()
            fill(pool, chunks, chunks + stores)
            rows.append(
                Row("reserve with eviction, commit", stores / (time.perf_counter() - begun), "/s")
            )
        gc.enable()
        pool.close()
    return rows


def ratio(large: Pool, chunks: int, small: Pool, fewer: int, laps: int) -> float:
    """Median over pairs of laps, one in each index, one after the other."""
    chance = random.Random(1)

    def lap(pool: Pool, among: int) -> float:
        batch = [key(chance.randrange(among)) for _ in range(BATCH)]
        begun = time.perf_counter()
        pool.index.slots_of(batch)
        return time.perf_counter() - begun

    return statistics.median(lap(large, chunks) / lap(small, fewer) for _ in range(laps))


def index_nbytes(chunks: int) -> float:
    """Memory of an index alone, keys and slot numbers included."""
    gc.collect()
    before = resident_nbytes()
    index = Index(extents=True)
    for number in range(chunks):
        index.add(key(number), PAGE, identity=IDENTITY)
    return (resident_nbytes() - before) / chunks


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
            print(f"{row.name:52} {row.value:12.3f} {row.unit:11} {bar}")
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
