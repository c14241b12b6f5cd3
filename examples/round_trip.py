"""What is here, and bytes through a tier: the plugins this environment offers, then the memory backend at work.

Stores chunks, looks them up with a stranger among them, loads them into memory of its own, compares every
byte, and prints the rates beside a plain copy of the same bytes in the same run.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time

from rich.console import Console
from rich.table import Table

from lmcache_core.registry import KINDS, Registry
from lmcache_core.spi import Key, Load, LoadStatus, Store, StoreStatus
from lmcache_core.testing.contexts import test_context

CHUNKS, NBYTES = 64, 1 << 20
SPACE = hashlib.sha256(b"example").digest()


def plugins(registry: Registry) -> Table:
    """Everything installed, without importing any of it."""
    table = Table("kind", "names", title="installed plugins")
    for kind, details in KINDS.items():
        if names := registry.names(kind):
            table.add_row(details.noun, ", ".join(names))
    return table


async def round_trip(registry: Registry, name: str) -> Table:
    """Store, look up, load, compare."""
    keys = [Key(SPACE, hashlib.sha256(bytes([i])).digest()) for i in range(CHUNKS)]
    stranger = Key(SPACE, bytes(32))
    values = [random.Random(i).randbytes(NBYTES) for i in range(CHUNKS)]
    buffers = [bytearray(NBYTES) for _ in keys]
    backend_type = registry.load("backends", name)
    backend = backend_type(backend_type.config_type(), test_context(tier=name))
    await backend.open()
    try:
        seconds = {}
        started = time.perf_counter()
        for buffer, value in zip(buffers, values, strict=True):
            buffer[:] = value
        seconds["plain copy"] = time.perf_counter() - started
        buffers = [bytearray(NBYTES) for _ in keys]

        started = time.perf_counter()
        stored = await backend.store(
            [Store(k, (memoryview(v),)) for k, v in zip(keys, values, strict=True)]
        )
        seconds["store"] = time.perf_counter() - started
        assert all(result.status is StoreStatus.STORED for result in stored), stored

        started = time.perf_counter()
        found = await backend.lookup([*keys, stranger])
        seconds["lookup"] = time.perf_counter() - started
        assert [item is not None for item in found] == [True] * CHUNKS + [False]

        started = time.perf_counter()
        loaded = await backend.load(
            [Load(k, (memoryview(b),)) for k, b in zip(keys, buffers, strict=True)]
        )
        seconds["load"] = time.perf_counter() - started
        assert all(result.status is LoadStatus.FILLED for result in loaded), loaded
        assert buffers == values, "a byte differs"
    finally:
        await backend.aclose()
    table = Table("step", "ms", "GB/s", title=f"{CHUNKS} chunks of 1 MiB through {name!r}")
    for step, spent in seconds.items():
        rate = "" if step == "lookup" else f"{CHUNKS * NBYTES / spent / 1e9:.1f}"
        table.add_row(step, f"{spent * 1e3:.2f}", rate)
    return table


def main() -> int:
    """Print both tables."""
    console = Console()
    registry = Registry()
    console.print(plugins(registry))
    console.print(asyncio.run(round_trip(registry, "memory")))
    console.print(f"every byte equal; {CHUNKS} hits, 1 miss for a key nobody stored")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
