"""The same traffic through ``StorageManager``: leases, reservations and commits instead of a bare policy.

``python benchmarks/traces_manager.py [--percent 1,2,5,10,20] [--policies lru,fifo,arc]`` prints hit rates, their
difference to the known values, and chunk operations per second: one operation is one chunk looked up,
leased, reserved or committed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lmcache_core.memory.arena import Access, Arena
from lmcache_core.memory.leases import Held
from lmcache_core.memory.pool import Pool
from lmcache_core.policies.arc import ARC
from lmcache_core.policies.fifo import FIFO
from lmcache_core.policies.lru import LRU
from lmcache_core.spi import EvictionPolicy, Key, MemoryOptions
from lmcache_core.storage.manager import StorageManager
from lmcache_core.testing.contexts import test_context
from lmcache_core.testing.replay import distinct, read_trace

TRACES = Path(__file__).parents[1] / "tests" / "data" / "traces"
SPACE = hashlib.sha256(b"space").digest()
PAGE = 4096
POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRU, "fifo": FIFO, "arc": ARC}


def replay(
    requests: Sequence[Sequence[Key]], blocks: int, policy: str
) -> tuple[float, float, float]:
    """Hit rate, and chunk operations per second and per second of processor time, in so many chunks of room."""
    kind = POLICIES[policy]
    capacity = blocks * PAGE
    arena = Arena(capacity, MemoryOptions(populate=False), access=Access.PRIVATE, overcommit=True)
    pool = Pool(arena, kind(kind.config_type(), capacity))
    manager = StorageManager(pool, context=test_context(tier="cpu"))
    identity = bytes(16)
    asked = hits = operations = 0
    begun, spent = time.perf_counter(), time.process_time()
    for keys in requests:
        leases = manager.lease(keys, "scheduler")
        asked += len(keys)
        hits += leases.leading()
        slots = leases.slots
        wants = [(key, PAGE) for key, slot in zip(keys, slots, strict=True) if slot < 0]
        leased = leases.left
        manager.release(leases)
        if wants:
            held = [each for each in manager.reserve(wants, "worker") if isinstance(each, Held)]
            # Root first, as the known values were computed; the touch that follows makes roots youngest.
            manager.commit_batch(held[::-1], [identity] * len(held))
            pool.touch(keys)
            operations += len(wants) + len(held)
        operations += len(keys) + leased
    seconds, spent = time.perf_counter() - begun, time.process_time() - spent
    pool.check()
    pool.close()
    return hits / asked, operations / seconds, operations / spent


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--percent", default="1,2,5,10,20")
    parser.add_argument("--policies", default="lru,fifo,arc")
    parser.add_argument("--traces", default="conversation,synthetic")
    options = parser.parse_args()
    reference = json.loads((TRACES / "reference.json").read_text())
    percents = [int(each) for each in options.percent.split(",")]
    wrong = 0
    print(
        f"{'trace':<14}{'policy':<8}{'size %':>7}{'hit %':>8}{'off pp':>8}{'k ops/s':>9}{'k ops/cpu-s':>12}"
    )
    for title in options.traces.split(","):
        blocks = read_trace(TRACES / f"mooncake_{title}_trace.jsonl.gz")
        known: dict[int, Key] = {}
        requests = [
            [
                known.setdefault(block, Key(SPACE, hashlib.sha256(b"%d" % block).digest()))
                for block in request
            ]
            for request in blocks
        ]
        total = distinct(blocks)
        for name in options.policies.split(","):
            for percent in percents:
                rate, speed, unshared = replay(requests, total * percent // 100, name)
                expected = reference[title][name][reference["percent"].index(percent)]
                off = 100 * (rate - expected)
                wrong += abs(off) > reference["tolerance_pp"][name]
                print(
                    f"{title:<14}{name:<8}{percent:>7}{100 * rate:>8.2f}{off:>+8.2f}{speed / 1000:>9.0f}{unshared / 1000:>12.0f}"
                )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
