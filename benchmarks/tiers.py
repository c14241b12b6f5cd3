"""One remote tier through its backend beside raw loops and other clients, on the same server in the same run.

    python benchmarks/tiers.py [NAME...] [--laps N] [--quick] [--json] [--peer "lmcache"]

NAME is a part: ``tiers_NAME.py`` beside this file offers ``benches(options)``, a context manager that starts the
server and gives a list of ``Bench``. Without a name every part that is there runs. A *mover* stores and loads
named values of 1, 4 and 16 MiB. Every lap every mover moves the same number of values, who begins changes from lap
to lap, and what was loaded is compared. Rates are medians over laps; *CPU* is what this process spent, per GiB, on all its
threads. A row shows what it reaches of others. ``--peer`` names a command that runs LMCache 0.5.6. Exit status 1: a bar was missed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lmcache_core.spi import AbstractBackend, Key, Load, LoadStatus, Store, StoreStatus

T = TypeVar("T")
HERE = Path(__file__).resolve().parent
MIB = 1 << 20
SIZES = (MIB, 4 * MIB, 16 * MIB)
SPACE = hashlib.sha256(b"benchmark").digest()


class Mover(Protocol):
    """Moves values; a verb returns the seconds it took where it measured them itself, else None.

    ``fills`` False: it loads into memory of its own, and what it loads is not compared.
    """

    name: str
    fills: bool

    def store(self, keys: Sequence[Key], values: Sequence[memoryview]) -> float | None: ...
    def load(self, keys: Sequence[Key], into: Sequence[memoryview]) -> float | None: ...
    def clear(self, keys: Sequence[Key]) -> None:
        """Forget what was stored; not measured."""

    def close(self) -> None: ...


class Ours:
    """A backend as the manager calls it: one batch at a time, on an event loop."""

    fills = True

    def __init__(self, backend: AbstractBackend, name: str = "ours") -> None:
        self.name = name
        self._backend = backend
        self._loop = asyncio.new_event_loop()
        self._do(backend.open())

    def store(self, keys: Sequence[Key], values: Sequence[memoryview]) -> None:
        pairs = zip(keys, values, strict=True)
        stored = self._do(self._backend.store([Store(key, (value,)) for key, value in pairs]))
        assert {one.status for one in stored} == {StoreStatus.STORED}, stored

    def load(self, keys: Sequence[Key], into: Sequence[memoryview]) -> None:
        pairs = zip(keys, into, strict=True)
        loaded = self._do(self._backend.load([Load(key, (view,)) for key, view in pairs]))
        assert {one.status for one in loaded} == {LoadStatus.FILLED}, loaded

    def clear(self, keys: Sequence[Key]) -> None:
        self._do(self._backend.delete(keys))

    def close(self) -> None:
        self._do(self._backend.aclose())
        self._loop.close()

    def _do(self, call: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(call)


@dataclass(frozen=True, slots=True)
class Bar:
    """Least that ``name`` may reach of what another mover reaches, and most CPU compared with it.

    What ``limit``, a mover too, does not reach itself is held against nobody; how far it comes is shown in its row.
    """

    of: str
    store: float = 0.0
    load: float = 0.0
    cpu: float = 0.0
    name: str = "ours"
    limit: str = ""


@dataclass(frozen=True, slots=True)
class Bench:
    """Movers on one server, and what is expected of them."""

    title: str
    movers: Sequence[Mover]
    bars: Sequence[Bar] = ()
    sizes: Sequence[int] = SIZES
    total: int = 128 * MIB
    """Bytes that each mover moves per lap and size."""


@dataclass(slots=True)
class Row:
    """One mover, size and verb: MB/s and CPU seconds per GiB, by lap; ``missed`` names bars."""

    bench: str
    mover: str
    nbytes: int
    verb: str
    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)


def memory(nbytes: int, count: int) -> list[memoryview]:
    """Page-aligned buffers that have been touched."""
    whole = memoryview(mmap.mmap(-1, nbytes * count))
    pattern = os.urandom(MIB)
    for at in range(0, whole.nbytes, MIB):
        whole[at : at + MIB] = pattern
    return [whole[at : at + nbytes] for at in range(0, whole.nbytes, nbytes)]


def measure(bench: Bench, nbytes: int, laps: int, total: int) -> list[Row]:
    """All movers on values of one size, lap by lap."""
    count = max(1, total // nbytes)
    values, into = memory(nbytes, count), memory(nbytes, count)
    for number, value in enumerate(values):
        value[:8] = number.to_bytes(8, "little")
    rows = {
        (mover.name, verb): Row(bench.title, mover.name, nbytes, verb)
        for mover in bench.movers
        for verb in ("store", "load")
    }
    for lap in range(-1, laps):  # the first one warms up and is not counted
        turn = lap % len(bench.movers)
        for mover in (*bench.movers[turn:], *bench.movers[:turn]):
            names = (f"{bench.title} {mover.name} {lap} {number}" for number in range(count))
            keys = [Key(SPACE, hashlib.sha256(name.encode()).digest()) for name in names]
            for verb, move, views in (("store", mover.store, values), ("load", mover.load, into)):
                began, spent = time.perf_counter(), time.process_time()
                own = move(keys, views)
                spent, took = time.process_time() - spent, time.perf_counter() - began
                if lap >= 0:
                    row = rows[mover.name, verb]
                    row.rates.append(nbytes * count / (own or took) / 1e6)
                    row.cpu.append(spent / (nbytes * count) * 2**30 if own is None else 0.0)
                if verb == "load" and mover.fills:
                    assert values == into, f"{mover.name} loaded other bytes than it stored"
                    for view in into:
                        view[:8] = bytes(8)
            mover.clear(keys)
    judge(bench, rows)
    return list(rows.values())


def reach(row: Row, other: Row) -> float:
    """Ratio of two movers' rates, lap by lap, for show as well."""
    pairs = zip(row.rates, other.rates, strict=True)
    row.ratios[other.mover] = statistics.median(a / b for a, b in pairs)
    return row.ratios[other.mover]


def judge(bench: Bench, rows: dict[tuple[str, str], Row]) -> None:
    """Hold every bar: the median of the ratios lap by lap, and of the CPU."""
    for bar in bench.bars:
        for verb, least in (("store", bar.store), ("load", bar.load)):
            mine, other = rows[bar.name, verb], rows.get((bar.of, verb))
            if other is None or not least:
                continue
            limit = rows.get((bar.limit, verb))
            possible = limit is None or reach(limit, other) >= least
            if reach(mine, other) < least and possible:
                mine.missed.append(f"{least:g} of {bar.of}")
            cpu = statistics.median(mine.cpu), statistics.median(other.cpu)
            if bar.cpu and cpu[0] > bar.cpu * cpu[1]:
                mine.missed.append(f"CPU {bar.cpu:g} of {bar.of}")


def show(rows: Sequence[Row]) -> None:
    """One line a row."""
    print(
        f"{'bench':<16}{'MiB':>4}  {'verb':<6}{'mover':<24}{'MB/s':>7}{'CPU s/GiB':>11}  it / others"
    )
    for row in rows:
        ratios = ", ".join(f"{ratio:.2f} of {name}" for name, ratio in row.ratios.items())
        missed = f"  MISSED {', '.join(row.missed)}" if row.missed else ""
        print(
            f"{row.bench:<16}{row.nbytes // MIB:>4}  {row.verb:<6}{row.mover:<24}"
            f"{statistics.median(row.rates):>7.0f}{statistics.median(row.cpu):>11.2f}  {ratios}{missed}"
        )


def parts() -> list[str]:
    """Names of the parts beside this file."""
    return sorted(path.stem.removeprefix("tiers_") for path in HERE.glob("tiers_*.py"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(parts()))
    parser.add_argument("--laps", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peer", default="")
    options = parser.parse_args()
    if unknown := set(options.names).difference(parts()):
        parser.error(f"no part {min(unknown)!r}; there are {', '.join(parts())}")
    sys.path.insert(0, str(HERE))
    rows: list[Row] = []
    for name in options.names or parts():
        made: AbstractContextManager[list[Bench]] = importlib.import_module(
            f"tiers_{name}"
        ).benches(options)
        with made as benches:
            for bench in benches:
                for nbytes in bench.sizes:
                    total = bench.total // 4 if options.quick else bench.total
                    found = measure(bench, nbytes, options.laps, max(total, nbytes))
                    if not options.json:
                        show(found)
                    rows += found
                for mover in bench.movers:
                    mover.close()
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    return int(any(row.missed for row in rows))


if __name__ == "__main__":
    # What a part imports from here must be what runs here.
    sys.modules["tiers"] = sys.modules["__main__"]
    raise SystemExit(main())
