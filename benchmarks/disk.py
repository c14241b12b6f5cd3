"""The disk tier against fio, lap by lap on one disk, and its restart.

    python benchmarks/disk.py [--folder F] [--laps N] [--quick] [--long] [--json] [--peer "lmcache"]

Ours is the tier as the manager uses it: frames in aligned memory, verified by the ``check`` wrapper before they
are stored and after they are loaded, through ``disk`` on threads of its own. fio moves the same bytes: one file
per object, the same size, count, number of threads and ``direct=1``; it reads the very files of ours, and writes
with one fdatasync per file for ``ordered`` and ``durable``. ``durable`` also syncs the folder of each new name; fio
does not rename and does not. A *ratio* is the median over laps of ours / fio, the two taking turns. ``--peer``
names a command that runs LMCache 0.5.6; its ``bench l2`` then takes its turn too (it neither verifies nor syncs; ours
is shown both ways). Takes 35 GB while it runs, 55 with a peer. ``--long`` also scans a million values. Exit status 1: a bar was missed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import mmap
import os
import shlex
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lmcache_backend_disk import DiskBackend
from lmcache_backend_disk.config import Direct, DiskConfig, Sync

from lmcache_core import frame
from lmcache_core.spi import (
    AbstractBackend,
    Interior,
    Key,
    KVSpec,
    Load,
    LoadStatus,
    SegmentSpec,
    Store,
    StoreStatus,
)
from lmcache_core.storage.build import default_context
from lmcache_core.threads import DaemonExecutor
from lmcache_core.wrappers import Check, CheckOptions

sys.path.insert(0, str(Path(__file__).resolve().parent))
from limits import fio  # type: ignore[import-not-found]  # it lies beside this file
from limits.peer import rates_of  # type: ignore[import-not-found]

MIB = 1 << 20
DEPTH = DiskConfig(path="").threads
BAR = 0.85
SHAPES = ((4 * MIB, 16), (MIB, 64))
"""Value length and values per call."""
SPACE = hashlib.sha256(b"benchmark").digest()


@dataclass(slots=True)
class Row:
    """One line; ``value`` is held against ``bar``: upwards, or downwards for seconds."""

    name: str
    value: float
    unit: str
    bar: float | None = None
    ours: float | None = None
    other: float | None = None

    @property
    def good(self) -> bool:
        """Whether the bar, if there is one, is met."""
        if self.bar is None:
            return True
        return self.value <= self.bar if self.unit == "s" else self.value >= self.bar


def key(number: int) -> Key:
    return Key(SPACE, hashlib.sha256(b"%d" % number).digest(), 0)


def frames(nbytes: int, count: int) -> list[memoryview]:
    """Sealed frames of exactly ``nbytes`` in page-aligned memory, four segments each."""
    memory = memoryview(mmap.mmap(-1, nbytes * count))
    pattern = os.urandom(MIB)
    for at in range(0, memory.nbytes, MIB):
        memory[at : at + MIB] = pattern
    values = [memory[at : at + nbytes] for at in range(0, memory.nbytes, nbytes)]
    seal(values)
    return values


def seal(values: Sequence[memoryview], first: int = 0) -> None:
    """Make frames of what is there, of the keys from ``first`` on."""
    head = frame.header_nbytes(4)
    share = (values[0].nbytes - head) // 4
    spec = KVSpec(
        "uint8", 256, 1, 0, 0, Interior.PAGE, tuple(SegmentSpec(i, 0, 1, share) for i in range(4))
    )
    for number, value in enumerate(values, first):
        value[head : head + 8] = number.to_bytes(8, "little")
        frame.seal_value(value[:head], value[head:], key(number), spec=spec)


async def tier(folder: Path, *, sync: Sync, direct: Direct) -> AbstractBackend:
    """The disk tier with its checks, opened."""
    executor, meeting = DaemonExecutor("lmcache-disk", DEPTH), threading.Barrier(DEPTH)
    for started in [executor.submit(meeting.wait) for _ in range(DEPTH)]:
        started.result()  # fio's threads run, too, when its clock starts
    context = replace(default_context("disk"), executor=executor)
    backend = DiskBackend(DiskConfig(path=str(folder), sync=sync, direct=direct), context)
    checked = Check(CheckOptions(), context, backend)
    await checked.open()
    return checked


async def stored(
    backend: AbstractBackend, values: Sequence[memoryview], batch: int, first: int = 0
) -> float:
    """Bytes per second of storing everything, ``batch`` values a call, under the keys from ``first`` on."""

    async def store(part: range) -> None:
        results = await backend.store([Store(key(first + n), (values[n],)) for n in part])
        assert {result.status for result in results} == {StoreStatus.STORED}, results

    return await timed(store, values, batch)


async def loaded(
    backend: AbstractBackend, values: Sequence[memoryview], batch: int, first: int = 0
) -> float:
    """The same for loading everything into ``values``."""

    async def load(part: range) -> None:
        results = await backend.load([Load(key(first + n), (values[n],)) for n in part])
        assert {result.status for result in results} == {LoadStatus.FILLED}, results

    return await timed(load, values, batch)


async def timed(
    move: Callable[[range], Awaitable[None]], values: Sequence[memoryview], batch: int
) -> float:
    """Bytes per second of moving everything, two calls under way."""

    async def lane(first: int) -> None:
        for start in range(first, len(values), 2 * batch):
            await move(range(start, min(start + batch, len(values))))

    started = time.perf_counter()
    await asyncio.gather(lane(0), lane(batch))
    return sum(value.nbytes for value in values) / (time.perf_counter() - started)


def fresh(folder: Path) -> Path:
    """A new folder on a disk that has nothing left to do.

    Nothing is deleted before the end: for minutes ext4 passes over each inode that was freed, one by one, whenever
    it makes a file, and whoever comes second in a folder's neighbourhood pays.
    """
    made = Path(tempfile.mkdtemp(dir=folder))
    os.sync()
    return made


async def against_fio(
    folder: Path, nbytes: int, batch: int, *, total: int, laps: int, direct: bool
) -> list[Row]:
    """Writes in every sync mode and reads; who begins changes from lap to lap."""
    count = total // nbytes
    values = frames(nbytes, count)
    target = memoryview(mmap.mmap(-1, total))
    targets = [target[at : at + nbytes] for at in range(0, total, nbytes)]
    for at in range(0, total, MIB):
        target[at : at + MIB] = bytes(MIB)  # faulted in
    rates: dict[str, list[tuple[float, float]]] = {}
    lines: dict[str, str] = {}
    how = Direct.ON if direct else Direct.OFF

    async def lap(
        name: str, number: int, line: list[str], ours: Coroutine[Any, Any, float]
    ) -> None:
        lines[name] = shlex.join(line)
        other = fio.run(line) if number % 2 else 0.0
        mine = await ours
        rates.setdefault(name, []).append((mine, other or fio.run(line)))

    for sync in Sync:
        for number in range(laps):
            work = fresh(folder)
            backend = await tier(work, sync=sync, direct=how)
            os.sync()  # the folders it made belong to the opening
            line = fio.command(
                work, "write", nbytes=nbytes, count=count, depth=DEPTH, direct=direct,
                sync=sync is not Sync.NONE,
            )  # fmt: skip
            await lap(f"write {sync.value}", number, line, stored(backend, values, batch))
            await backend.aclose()
    work = fresh(folder)
    backend = await tier(work, sync=Sync.ORDERED, direct=how)
    await stored(backend, values, batch)
    for number in range(count):  # fio reads the very files of ours, by other names
        name = key(number).text
        job, at = divmod(number, count // DEPTH)
        os.link(work / name[-2:] / name, work / f"object.{job}.{at}")
    line = fio.command(
        work, "read", nbytes=nbytes, count=count, depth=DEPTH, direct=direct, sync=False
    )
    for number in range(laps):
        await lap("read", number, line, loaded(backend, targets, batch))
    await backend.aclose()
    label = f"{batch} x {nbytes // MIB} MiB {'direct' if direct else 'buffered'}"
    for name, line in lines.items():
        print(f"# {label} {name}: {line}", file=sys.stderr)
    return [
        Row(
            f"{label} {name}",
            statistics.median(ours / other for ours, other in pairs),
            "of fio",
            BAR if direct else None,
            statistics.median(ours for ours, _ in pairs) / 1e6,
            statistics.median(other for _, other in pairs) / 1e6,
        )
        for name, pairs in rates.items()
    ]


PEER: tuple[tuple[str, dict[str, object], Direct], ...] = (
    ("native O_DIRECT", {"type": "fs_native", "use_odirect": True}, Direct.ON),
    ("native buffered", {"type": "fs_native", "use_odirect": False}, Direct.OFF),
    ("python", {"type": "fs"}, Direct.OFF),
)


async def against_peer(folder: Path, peer: str, laps: int) -> list[Row]:
    """16 x 4 MiB in turn with ``lmcache bench l2``: nothing synced on either side, nothing verified on theirs."""
    nbytes, batch = SHAPES[0]
    values = frames(nbytes, batch)
    rows = []
    for name, adapter, direct in PEER:
        kinds = ("store", "load", "store verified", "load verified")
        rates: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for lap in range(laps):
            work = fresh(folder)
            for side in ("ours", "theirs"):
                (work / side).mkdir()
            theirs = {}
            placed = adapter | {"base_path": str(work / "theirs")}
            if lap % 2:
                theirs = await asyncio.to_thread(rates_of, peer, placed)
            backend = await tier(work / "ours", sync=Sync.NONE, direct=direct)
            assert isinstance(backend, Check)
            ours: dict[str, list[float]] = {kind: [] for kind in rates}
            for first in range(0, 12 * batch, batch):  # new keys each time, like the peer
                seal(values, first)
                kind, store = (" verified", backend) if first // batch % 2 else ("", backend.inner)
                ours["store" + kind].append(await stored(store, values, batch, first))
                ours["load" + kind].append(await loaded(store, values, batch, first))
            await backend.aclose()
            theirs = theirs or await asyncio.to_thread(rates_of, peer, placed)
            for verb in rates:
                rates[verb].append((statistics.mean(ours[verb][1:]), theirs[verb.split()[0]]))
        rows += [
            Row(
                f"16 x 4 MiB {verb}, like the peer's {name}",
                statistics.median(mine / other for mine, other in pairs),
                "of peer",
                None if "verified" in verb else 1.0,
                statistics.median(mine for mine, _ in pairs) / 1e6,
                statistics.median(other for _, other in pairs) / 1e6,
            )
            for verb, pairs in rates.items()
        ]
    return rows


def populate(folder: Path, count: int) -> None:
    """Files named and as long as the tier's 4 KiB frames; only the first holds bytes (listings read none)."""
    made: set[str] = set()
    block = bytes(4096)
    for number in range(count):
        name = key(number).text
        if name[-2:] not in made:
            (folder / name[-2:]).mkdir(mode=0o700)
            made.add(name[-2:])
        descriptor = os.open(folder / name[-2:] / name, os.O_CREAT | os.O_WRONLY, 0o600)
        if number:
            os.ftruncate(descriptor, len(block))
        else:
            os.write(descriptor, block)
        os.close(descriptor)
    (folder / "tmp").mkdir()
    (folder / "layout").write_text("lmcache disk 1\nfan_out 256\n")


async def restart(folder: Path, count: int, *, scan: bool) -> list[Row]:
    """Open a folder with ``count`` values: time to the first hit, all hits, and a whole listing."""
    work = folder / f"restart-{count}"
    work.mkdir()
    populate(work, count)
    context = default_context("disk")
    buffer = memoryview(bytearray(4096))
    started = time.perf_counter()
    backend = DiskBackend(DiskConfig(path=str(work)), context)
    await backend.open()
    (result,) = await backend.load([Load(key(0), (buffer,))])
    first = time.perf_counter() - started
    assert result.nbytes == 4096
    rows = [Row(f"first hit after start, {count} values", first, "s", 1.0)]
    if not scan:
        started = time.perf_counter()
        hits = 0
        for start in range(0, count, 1000):
            found = await backend.lookup([key(n) for n in range(start, start + 1000)])
            hits += sum(each is not None for each in found)
        rows.append(Row(f"hits, {count} values", hits / count, "share", 1.0))
        rate = (time.perf_counter() - started) / count * 1e6
        rows.append(Row("lookup, 1000 a call", rate, "us each"))
    started = time.perf_counter()
    after, listed = None, 0
    while True:
        page = await backend.scan(after, limit=4096)
        listed += len(page.values)
        after = page.after
        if after is None:
            break
    assert listed == count, listed
    rows.append(
        Row(
            f"scan of {count} values, warm",
            time.perf_counter() - started,
            "s",
            60.0 if scan else None,
        )
    )
    await backend.aclose()
    shutil.rmtree(work)
    return rows


async def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    """Everything that was asked for."""
    total = (64 if options.quick else 256) * MIB
    rows = []
    for nbytes, batch in SHAPES:
        for direct in (True, False):
            rows += await against_fio(
                folder, nbytes, batch, total=total, laps=options.laps, direct=direct
            )
    if options.peer:
        rows += await against_peer(folder, options.peer, options.laps)
    rows += await restart(folder, 10_000 if options.quick else 100_000, scan=False)
    if options.long:
        rows += await restart(folder, 1_000_000, scan=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; default: beside this tree"
    )
    parser.add_argument("--laps", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peer", default="")
    options = parser.parse_args()
    if not fio.available():
        print("fio is missing: apt-get install fio", file=sys.stderr)
        return 2
    base = options.folder or Path(__file__).resolve().parent.parent / ".lmcache-work"
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base, prefix="bench-disk-") as folder:
        rows = asyncio.run(measure(options, Path(folder)))
    if options.json:
        print(json.dumps([asdict(row) | {"good": row.good} for row in rows], indent=2))
    else:
        print(f"{'what':<52}{'value':>9} {'unit':<8}{'bar':>6}{'ours MB/s':>11}{'other':>8}")
        for row in rows:
            bar = "" if row.bar is None else f"{row.bar:g}"
            rates = "".join(
                f"{rate:>{w}.0f}" if rate else " " * w
                for rate, w in ((row.ours, 11), (row.other, 8))
            )
            print(
                f"{row.name:<52}{row.value:>9.3f} {row.unit:<8}{bar:>6}{rates}{'' if row.good else '  MISSED'}"
            )
    return int(not all(row.good for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
