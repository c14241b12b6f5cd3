"""The resident tier through ``StorageManager``: copies against memcpy, and digest plus lookup of a long prompt.

``python benchmarks/storage_tier.py [--laps 7]`` measures everything in one run, A and B in turns:

* store: reserve, copy in, seal, commit; load: lease, copy out, release; of a 4 k-token prefix (16 chunks) of
  67 MB and of 512 MB; without digests (sealed with known ones) and with the digest made in the same pass.
* digest 100 k token ids into 390 chunk names, look them up and lease them, from a buffer and from a list.

Prints the median of the ratios, and the first lap (fresh memory) apart.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import statistics
import sys
import time
from array import array
from collections.abc import Callable

from lmcache_core import frame, ops
from lmcache_core.identity import chain
from lmcache_core.memory.arena import Access, Arena
from lmcache_core.memory.pool import Pool
from lmcache_core.policies.lru import LRU, LRUConfig
from lmcache_core.spi import Interior, Key, KVSpec, MemoryOptions, Refusal, SegmentSpec
from lmcache_core.storage.manager import StorageManager
from lmcache_core.testing.contexts import test_context

CHUNKS, TOKENS = 16, 256
SPACE = hashlib.sha256(b"space").digest()
BARS = {"store": 0.80, "load": 0.80, "store+digest": 0.65}


def make_manager(capacity: int) -> StorageManager:
    arena = Arena(capacity, MemoryOptions(populate=False), access=Access.SHARED)
    pool = Pool(arena, LRU(LRUConfig(), capacity))
    return StorageManager(pool, context=test_context(tier="cpu"))


def keys_of(lap: int) -> list[Key]:
    return [Key(SPACE, hashlib.sha256(b"%d %d" % (lap, at)).digest()) for at in range(CHUNKS)]


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def copies(total: int, laps: int) -> dict[str, list[float]]:
    """Ratios to memcpy of the same bytes, one per lap."""
    nbytes = total // CHUNKS
    spec = KVSpec("uint8", TOKENS, 1, 0, 0, Interior.PAGE, (SegmentSpec(0, 0, 0, nbytes),))
    room = frame.header_nbytes(1)
    manager = make_manager(3 * (total + CHUNKS * (room + 4096)))
    # Shared mappings like the arena: private memory would have huge pages and compare other things.
    maps = [mmap.mmap(-1, total), mmap.mmap(-1, total)]
    for each in maps:
        ops.populate(each)
    source, target = (
        [memoryview(each)[at : at + nbytes] for at in range(0, total, nbytes)] for each in maps
    )
    unknown = [bytes(16)]

    def memcpy() -> None:
        for one, two in zip(target, source, strict=True):
            ops.copy(one, two)

    def store(keys: list[Key], digest: bool) -> None:
        grants = manager.reserve([(key, room + nbytes) for key in keys], "worker")
        identities = []
        for grant, piece in zip(grants, source, strict=True):
            assert not isinstance(grant, Refusal), grant
            view = grant.view
            if digest:
                digests = [ops.copy_and_digest(view[room:], piece, frame.seed_of(grant.key))]
            else:
                ops.copy(view[room:], piece)
                digests = unknown
            sealed = frame.seal(view[:room], grant.key, spec=spec, digests=digests)
            identities.append(sealed.identity)
        assert all(manager.commit_batch(grants, identities))  # type: ignore[arg-type]  # all granted

    def load(keys: list[Key]) -> None:
        leases = manager.lease(keys, "worker")
        for lease, piece in zip(leases, target, strict=True):
            assert lease is not None
            ops.copy(piece, lease.view[room:])
        manager.release(leases)

    ratios: dict[str, list[float]] = {"store": [], "load": [], "store+digest": []}
    for lap in range(laps + 3):  # the first three laps fill fresh memory
        digest = bool(lap % 2)
        keys = keys_of(lap)
        plain = timed(memcpy)
        stored = timed(lambda keys=keys, digest=digest: store(keys, digest))  # type: ignore[misc]
        loaded = timed(lambda keys=keys: load(keys))  # type: ignore[misc]
        again = timed(memcpy)
        plain = (
            plain + again
        ) / 2  # right before and right after: what else runs here slows all alike
        ratios["store+digest" if digest else "store"].append(plain / stored)
        ratios["load"].append(plain / loaded)
        if lap == 0:
            print(
                f"  first lap, {total >> 20} MiB: store {plain / stored:.2f}, load {plain / loaded:.2f}"
            )
        if lap == 2:
            ratios = {name: [] for name in ratios}
    manager.pool.close()
    return ratios


def lookups(laps: int) -> tuple[float, float]:
    """Milliseconds to name, look up and lease 390 chunks, from a buffer and from a list."""
    ids = [(7919 * at) % 150_000 for at in range(100_000)]
    packed = array("I", ids)
    root = hashlib.sha256(b"root").digest()
    manager = make_manager(64 << 20)
    names = chain.keys(SPACE, chain.chunk_digests(root, packed.tobytes(), TOKENS))
    grants = manager.reserve([(key, 4096) for key in names], "worker")
    manager.commit_batch(grants, [bytes(16)] * len(grants))  # type: ignore[arg-type]  # all granted
    found = []
    for tokens in (memoryview(packed), ids):
        spent = []
        for _ in range(laps * 10):
            begun = time.perf_counter()
            keys = chain.keys(SPACE, chain.chunk_digests(root, tokens, TOKENS))
            leases = manager.lease(keys, "scheduler")
            spent.append(time.perf_counter() - begun)
            assert leases.leading() == len(names) == 390
            manager.release(leases)
        found.append(1000 * statistics.median(spent))
    manager.pool.close()
    return found[0], found[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--laps", type=int, default=12)
    parser.add_argument("--sizes", default="64,512", help="MiB")
    options = parser.parse_args()
    print(f"ops: {ops.implementation()}")
    wrong = 0
    for size in options.sizes.split(","):
        for name, ratios in copies(
            int(size) << 20, options.laps * max(1, 512 // int(size))
        ).items():
            ratio = statistics.median(ratios)
            wrong += ratio < BARS[name]
            print(
                f"{size:>4} MiB {name:<13} {ratio:5.2f} of memcpy (bar {BARS[name]:.2f}, best {max(ratios):.2f})"
            )
    buffer, listed = lookups(options.laps)
    wrong += (buffer > 1.5) + (listed > 3.0)
    print(
        f"100 k ids, 390 chunks: {buffer:.2f} ms from a buffer (bar 1.5), {listed:.2f} ms from a list (bar 3)"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
