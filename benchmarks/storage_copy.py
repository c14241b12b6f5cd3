"""How fast the byte operations run: each against a plain memcpy of the same bytes, in the same lap.

    python benchmarks/storage_copy.py [--laps N] [--quick] [--json]

Source and target are shared memfd mappings, faulted in before the first lap. A *ratio* is the median over all
laps of (time of one single-thread ``memmove`` / time of the operation); 1 means as fast as memcpy. ``first`` is
that ratio in the very first lap. Exit status 1: a bar was missed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import statistics
import sys
import threading
import time
import tracemalloc
from array import array
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial

from lmcache_core import ops
from lmcache_core.spi.layout import Interior, PageSpec

SIZES = (64 << 20, 512 << 20)
RUNS = (128, 256, 512, 1024, 4096, 8192, 32768)
PLAIN, FUSED, TWO = 0.80, 0.65, 1.5
"""Bars: ratio without digest, ratio with it, two threads over one of memcpy."""
IDS, CHUNK = 100_000, 256


@dataclass(slots=True)
class Row:
    """One line of the table; ``value`` is held against ``bar``, upwards or (milliseconds) downwards."""

    name: str
    value: float
    unit: str
    bar: float | None = None
    first: float | None = None
    rate: float | None = None

    @property
    def good(self) -> bool:
        """Whether the bar, if there is one, is met."""
        if self.bar is None:
            return True
        return self.value <= self.bar if self.unit == "ms" else self.value >= self.bar


def mapped(nbytes: int) -> mmap.mmap:
    """A shared mapping with every page there and content that is not all one page."""
    descriptor = os.memfd_create("storage-copy")
    try:
        os.ftruncate(descriptor, nbytes)
        memory = mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)
    ops.populate(memory)
    for at in range(0, nbytes, 1 << 20):
        memory[at : at + 64] = os.urandom(64)
    return memory


def address(memory: mmap.mmap) -> int:
    """Where the mapping begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def timed(work: Mapping[str, Callable[[], object]], laps: int) -> dict[str, list[float]]:
    """Seconds of each, lap by lap, all of them in every lap."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(laps):
        for name, call in work.items():
            started = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def paired(base: list[float], other: list[float]) -> float:
    """Median over laps of how many times faster ``other`` is than ``base``."""
    return statistics.median(b / o for b, o in zip(base, other, strict=True))


def halves(target: int, source: int, nbytes: int) -> None:
    """memmove on two threads: what a second core is worth to memcpy itself."""
    half = nbytes // 2
    other = threading.Thread(target=ctypes.memmove, args=(target + half, source + half, half))
    other.start()
    ctypes.memmove(target, source, half)
    other.join()


def rows_of(
    label: str, seconds: dict[str, list[float]], nbytes: int, bars: dict[str, float]
) -> list[Row]:
    """Ratios of everything but the memmove, which they refer to."""
    base = seconds["memmove"]
    return [
        Row(
            f"{label} {name}",
            paired(base, laps),
            "of memcpy",
            bars.get(name),
            base[0] / laps[0],
            nbytes / statistics.median(laps) / 1e9,
        )
        for name, laps in seconds.items()
    ]


def copies(nbytes: int, laps: int) -> list[Row]:
    """Contiguous copies of one size."""
    target, source = mapped(nbytes), mapped(nbytes)
    to, of = address(target), address(source)
    seconds = timed(
        {
            "memmove": lambda: ctypes.memmove(to, of, nbytes),
            "copy": lambda: ops.copy(target, source),
            "copy + digest": lambda: ops.copy_and_digest(target, source, 7),
            "digest only": lambda: ops.digest(source, 7),
            "copy, 2 threads": lambda: ops.copy(target, source, threads=2),
            "memmove, 2 threads": lambda: halves(to, of, nbytes),
        },
        laps,
    )
    label = f"{nbytes / 1e6:.0f} MB"
    rows = rows_of(label, seconds, nbytes, {"copy": PLAIN, "copy + digest": FUSED})
    # Best laps: whatever else runs here takes the second core first, and says nothing about us.
    # Held against memcpy, because one thread of ours already uses most of the memory's rate.
    best = {name: min(times) for name, times in seconds.items()}
    for name, base, bar in (
        ("copy, 2 threads", "memmove", TWO),
        ("copy, 2 threads", "copy", None),
        ("memmove, 2 threads", "memmove", None),
    ):
        gain = best[base] / best[name]
        rows.append(Row(f"{label} {name} over 1 {base}, best laps", gain, "times", bar))
    return rows


def paged(run: int, start: int, span: int) -> ops.PlaneTable:
    """Engine memory whose contiguous runs are ``run`` bytes: token rows of keys beside values in
    blocks of 16 tokens, and above 2 KiB whole blocks at random places."""
    layers, share = 8, span // 8
    if run > 2048:
        shape = {"heads": run // 4096, "states": 16, "cell_bytes": 256, "block_stride": run}
        strides = {"state_stride": 256, "head_stride": 4096, "blocks": share // run}
        planes, interior = 1, Interior.PAGE
    else:
        block = 16 * 8 * 2 * run
        shape = {"heads": 8, "states": 16, "cell_bytes": run, "block_stride": block}
        strides = {"state_stride": 16 * run, "head_stride": 2 * run, "blocks": share // block}
        planes, interior = 2, Interior.ROWS
    return ops.PlaneTable(
        [
            PageSpec(
                layer=layer,
                plane=plane,
                group=0,
                pointer=start + layer * share + plane * run,
                interior=interior,
                **shape,
                **strides,
            )
            for layer in range(layers)
            for plane in range(planes)
        ]
    )


def pages(nbytes: int, laps: int) -> list[Row]:
    """Gather and scatter for runs from one head's row to a whole block."""
    engine, target, source = mapped(2 * nbytes), mapped(nbytes), mapped(nbytes)
    to, of, rows = address(target), address(source), []
    for run in RUNS:
        table = paged(run, address(engine), 2 * nbytes)
        count = nbytes // table.unit_nbytes // table.states * table.states
        listed = random.Random(run).sample(range(table.blocks), count // table.states)
        size, ids = table.nbytes(count), array("q", listed)
        body = memoryview(target)[:size]
        digests = ops.gather(table, ids, 0, count, body, seed=7)
        gather = partial(ops.gather, table, ids, 0, count, body)
        scatter = partial(ops.scatter, table, ids, 0, count, body)
        seconds = timed(
            {
                "memmove": partial(ctypes.memmove, to, of, size),
                "gather": gather,
                "gather + digest": partial(gather, seed=7),
                "gather, 2 threads": partial(gather, threads=2),
                "scatter": scatter,
                "scatter + verify": partial(scatter, seed=7, digests=digests),
            },
            laps,
        )
        assert scatter(seed=7, digests=digests) == -1
        bars = {
            "gather": PLAIN,
            "gather + digest": FUSED,
            "scatter": PLAIN,
            "scatter + verify": FUSED,
        }
        found = rows_of(f"{run} B runs", seconds, size, bars)
        rows += found[1:]
        gain = min(seconds["gather"]) / min(seconds["gather, 2 threads"])
        rows.append(Row(f"{run} B runs gather, 2 threads over 1, best laps", gain, "times"))
        body.release()
    return rows


def tokens(laps: int) -> list[Row]:
    """Chunk digests of 100 k ids, from a buffer and from a list."""
    ids = [*range(IDS)]
    random.Random(1).shuffle(ids)
    packed, root = array("I", ids), bytes(32)
    work = {
        "chain of 100 k ids, buffer": lambda: ops.chain(root, packed, CHUNK),
        "packing 100 k ids, list": lambda: ops.pack_tokens(ids),
        "both": lambda: ops.chain(root, ops.pack_tokens(ids), CHUNK),
    }
    bars = {"chain of 100 k ids, buffer": 1.0, "both": 2.0}
    return [
        Row(name, statistics.median(times) * 1e3, "ms", bars.get(name), times[0] * 1e3)
        for name, times in timed(work, 4 * laps).items()
    ]


def allocations() -> list[Row]:
    """Python memory that 1,000 calls leave at their peak, beyond what they return."""
    memory = mapped(4 << 20)
    table = paged(512, address(memory), 4 << 20)
    ids, target = array("q", range(2)), bytearray(table.nbytes(32))
    tracemalloc.start()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(1000):
        ops.gather(table, ids, 0, 32, target, seed=1)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    return [Row("peak of traced memory, 1,000 fused gathers", float(peak), "bytes")]


def main(arguments: list[str]) -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--laps", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="67 MB only, fewer laps")
    parser.add_argument("--json", action="store_true", help="print JSON and no table")
    options = parser.parse_args(arguments)
    laps = 5 if options.quick else options.laps
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    about = f"{ops.implementation()}; {os.cpu_count()} cores, load {load}"
    print(about, file=sys.stderr)
    rows: list[Row] = []
    for size in SIZES[: 1 if options.quick else None]:
        rows += copies(size, laps if size < 256 << 20 else max(5, laps // 2))
    rows += pages(SIZES[0], laps)
    rows += tokens(laps) + allocations()
    if options.json:
        described = [asdict(row) | {"good": row.good} for row in rows]
        print(json.dumps({"about": about, "rows": described}, indent=1))
        return int(not all(row.good for row in rows))
    print(f"{'':52} {'value':>8} {'':10} {'first':>7} {'GB/s':>6} {'bar':>6}")
    for row in rows:
        first = "" if row.first is None else f"{row.first:.2f}"
        rate = "" if row.rate is None else f"{row.rate:.1f}"
        bar = "" if row.bar is None else f"{row.bar:g}"
        verdict = "" if row.good else "  MISSED"
        print(
            f"{row.name:52} {row.value:8.2f} {row.unit:10} {first:>7} {rate:>6} {bar:>6}{verdict}"
        )
    return int(not all(row.good for row in rows))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
