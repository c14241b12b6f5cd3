"""What is physically there for a store: fio, our system calls in C, our tier without and with its checks, in turns.

    python benchmarks/disk_limits.py [--folder F] [--laps N] [--size MIB] [--buffered]

``fio`` as in ``benchmarks/disk.py``: no names to give, no folder to sync. ``C`` makes the calls of a store of ours
without Python (``limits/disk_calls.c``); ``C, over`` makes them on files that were written before, as those of deleted
values would be. ``memory`` verifies the same frames and copies them to other memory, on all cores and without any file:
no verified store through the page cache is faster. MB/s (median, least, most) and the median over laps of the ratio
to fio. Needs fio and cc.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from disk import (  # type: ignore[import-not-found]  # it lies beside this file
    DEPTH,
    MIB,
    SHAPES,
    Check,
    Direct,
    Sync,
    fio,
    frames,
    fresh,
    key,
    stored,
    tier,
)

from lmcache_core import frame, ops

SOURCE = Path(__file__).parent / "limits/disk_calls.c"
TOTAL = 256 * MIB


class Contest:
    """Everybody who takes part, for one length of values.

    Args:
        program: ``SOURCE``, compiled.
    """

    def __init__(self, folder: Path, program: Path, nbytes: int, batch: int, direct: bool) -> None:
        self.folder, self.program = folder, program
        self.nbytes, self.batch, self.direct = nbytes, batch, direct
        self.values = frames(nbytes, TOTAL // nbytes)
        self.target = memoryview(mmap.mmap(-1, nbytes * (os.cpu_count() or 1)))

    def fio(self, sync: Sync) -> float:
        line = fio.command(
            fresh(self.folder), "write", nbytes=self.nbytes, count=len(self.values), depth=DEPTH,
            direct=self.direct, sync=sync is not Sync.NONE,
        )  # fmt: skip
        return float(fio.run(line))

    def calls(self, sync: Sync, *again: str) -> float:
        how = "direct" if self.direct else "buffered"
        numbers = map(str, (self.nbytes, len(self.values), DEPTH))
        line = [str(self.program), str(fresh(self.folder)), *numbers, how, sync.value, *again]
        return float(subprocess.run(line, check=True, capture_output=True, text=True).stdout)

    def ours(self, sync: Sync, *, verified: bool) -> float:
        async def run() -> float:
            how = Direct.ON if self.direct else Direct.OFF
            backend = await tier(fresh(self.folder), sync=sync, direct=how)
            assert isinstance(backend, Check)
            os.sync()
            try:
                into = backend if verified else backend.inner
                return await stored(into, self.values, self.batch)
            finally:
                await backend.aclose()

        return asyncio.run(run())

    def memory(self, sync: Sync) -> float:
        """Verify and copy; the mode changes nothing."""
        cores = os.cpu_count() or 1

        def move(first: int) -> None:
            into = self.target[first * self.nbytes : (first + 1) * self.nbytes]
            for number in range(first, len(self.values), cores):
                header = frame.open_header(self.values[number], key(number))
                frame.verify(header, self.values[number][header.nbytes :])
                ops.copy(into, self.values[number])

        with ThreadPoolExecutor(cores) as pool:
            started = time.perf_counter()
            list(pool.map(move, range(cores)))
            return TOTAL / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[1] / ".lmcache-work")
    parser.add_argument("--laps", type=int, default=5)
    parser.add_argument("--size", type=int, choices=[n // MIB for n, _ in SHAPES], default=1)
    parser.add_argument("--buffered", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="limits-") as folder:
        program = Path(folder, "disk_calls")
        subprocess.run(["cc", "-O2", "-pthread", "-o", program, SOURCE], check=True)
        nbytes = options.size * MIB
        contest = Contest(Path(folder), program, nbytes, dict(SHAPES)[nbytes], not options.buffered)
        players = {
            "fio": contest.fio,
            "C": contest.calls,
            "C, over": lambda sync: contest.calls(sync, "again"),
            "ours": lambda sync: contest.ours(sync, verified=False),
            "ours, verified": lambda sync: contest.ours(sync, verified=True),
        }
        if options.buffered:
            players["memory"] = contest.memory
        names = list(players)
        for sync in Sync:
            rates: dict[str, list[float]] = {name: [] for name in names}
            for lap in range(options.laps):
                turn = lap % len(names)
                for name in names[turn:] + names[:turn]:
                    rates[name].append(players[name](sync) / 1e6)
            for name, found in rates.items():
                ratio = statistics.median(a / b for a, b in zip(found, rates["fio"], strict=True))
                middle = statistics.median(found)
                spread = f"{middle:8.0f}{min(found):8.0f}{max(found):8.0f}"
                print(f"{sync.value:<9}{name:<16}{spread}{ratio:8.2f}", flush=True)


if __name__ == "__main__":
    main()
