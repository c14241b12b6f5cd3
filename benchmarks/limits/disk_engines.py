"""Three ways to move the same files from Python: threads with preadv/pwritev, aiofiles, io_uring.

    python benchmarks/limits/disk_engines.py [--folder F] [--laps N]

Each lap writes and reads the same objects through every engine, direct where the engine can (aiofiles has no
O_DIRECT and no caller's buffer on its read side: it is measured through the page cache, its only mode, beside threads in that
mode). No sync, no rename: only the moving. Prints MB/s, median over laps. Needs ``pip install aiofiles liburing``.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiofiles  # type: ignore[import-untyped]
import liburing as ring_library  # type: ignore[import-untyped]

MIB = 1 << 20
DEPTH = 8
CREATE = os.O_CREAT | os.O_TRUNC | os.O_WRONLY


def threads(folder: Path, views: list[memoryview], write: bool, direct: bool) -> None:
    """One system call per object on a pool of threads."""
    flags = (CREATE if write else os.O_RDONLY) | (os.O_DIRECT if direct else 0)

    def move(number: int) -> None:
        descriptor = os.open(folder / str(number), flags, 0o600)
        call = os.pwritev if write else os.preadv
        assert call(descriptor, [views[number]], 0) == views[number].nbytes
        os.close(descriptor)

    with ThreadPoolExecutor(DEPTH) as pool:
        list(pool.map(move, range(len(views))))


def uring(folder: Path, views: list[memoryview], write: bool, direct: bool) -> None:
    """One ring, ``DEPTH`` transfers in flight, opened and closed by plain system calls."""
    flags = (CREATE if write else os.O_RDONLY) | (os.O_DIRECT if direct else 0)
    ring, completion = ring_library.Ring(), ring_library.Cqe()
    ring_library.io_uring_queue_init(DEPTH * 2, ring)
    prepare = ring_library.io_uring_prep_writev if write else ring_library.io_uring_prep_readv
    waiting = list(range(len(views)))
    flying: dict[int, tuple[int, object]] = {}
    try:
        while waiting or flying:
            while waiting and len(flying) < DEPTH:
                number = waiting.pop()
                descriptor = os.open(folder / str(number), flags, 0o600)
                entry = ring_library.io_uring_get_sqe(ring)
                vector = ring_library.Iovec([views[number]])
                prepare(entry, descriptor, vector, 0)
                ring_library.io_uring_sqe_set_data64(entry, number + 1)
                flying[number] = descriptor, vector
            ring_library.io_uring_submit_and_wait(ring, 1)
            ring_library.io_uring_wait_cqe(ring, completion)
            found = completion[0]
            number = found.user_data - 1
            assert found.res == views[number].nbytes, os.strerror(-found.res)
            ring_library.io_uring_cqe_seen(ring, found)
            os.close(flying.pop(number)[0])
    finally:
        ring_library.io_uring_queue_exit(ring)


def files(folder: Path, views: list[memoryview], write: bool, direct: bool) -> None:
    """aiofiles: a thread hop for open, for the transfer and for close; through the page cache."""

    async def move(number: int, gate: asyncio.Semaphore) -> None:
        async with gate, aiofiles.open(folder / str(number), "wb" if write else "rb") as file:
            if write:
                await file.write(views[number])
            else:
                assert await file.readinto(views[number]) == views[number].nbytes

    async def main() -> None:
        gate = asyncio.Semaphore(DEPTH)
        await asyncio.gather(*(move(number, gate) for number in range(len(views))))

    asyncio.run(main())


ENGINES: tuple[tuple[str, Callable[[Path, list[memoryview], bool, bool], None], bool], ...] = (
    ("threads, direct", threads, True),
    ("io_uring, direct", uring, True),
    ("threads, page cache", threads, False),
    ("io_uring, page cache", uring, False),
    ("aiofiles, page cache", files, False),
)


def measure(base: Path, nbytes: int, total: int, laps: int) -> None:
    """Print one line per engine for one object size."""
    memory = memoryview(mmap.mmap(-1, total))
    memory[:] = os.urandom(MIB) * (total // MIB)
    views = [memory[at : at + nbytes] for at in range(0, total, nbytes)]
    rates: dict[tuple[str, str], list[float]] = {}
    for lap in range(laps):
        for name, move, direct in ENGINES[lap % len(ENGINES) :] + ENGINES[: lap % len(ENGINES)]:
            folder = base / "work"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            os.sync()
            for verb in ("write", "read"):
                started = time.perf_counter()
                move(folder, views, verb == "write", direct)
                rate = total / (time.perf_counter() - started) / 1e6
                rates.setdefault((name, verb), []).append(rate)
    for name, _, _ in ENGINES:
        write, read = (statistics.median(rates[name, verb]) for verb in ("write", "read"))
        print(f"{nbytes // MIB} MiB  {name:<22}{write:>8.0f}{read:>8.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[2] / ".lmcache-work")
    parser.add_argument("--laps", type=int, default=7)
    options = parser.parse_args()
    print(f"MB/s{'':<24}{'write':>8}{'read':>8}")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for nbytes in (4 * MIB, MIB):
            measure(Path(folder), nbytes, 256 * MIB, options.laps)


if __name__ == "__main__":
    main()
