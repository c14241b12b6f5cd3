"""``python -m tests.simulation``: histories of the whole by the thousand, or ``--planted``: bugs they must find.

Prints what happened and which faults met something, and fails when a history broke a promise, or a bug was not found.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial

from lmcache_core.testing.histories import History, Outcome, run_history
from tests.simulation.histories import DaemonHistory
from tests.simulation.planted import BUGS, Bug

BLOCK = 25
LOCAL = 5
"""One history out of so many has no daemon: all its clients sit beside the manager."""
KINDS = ("memory", "memory", "disk")
OPERATIONS = 44
"""Of clients in each: as many as meet more than 50 faults, and no more, as nights have 20,000 histories."""


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def history(seed: int, operations: int = OPERATIONS) -> Outcome:
    """The history of a seed."""
    kind = DaemonHistory if seed % LOCAL else History
    return run_history(seed, operations=operations, kinds=KINDS, kind=kind)


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing is logged; nor is what a failed history leaves behind, coroutines without a loop."""
    hook = sys.unraisablehook
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda unraisable: None
    try:
        yield
        gc.collect()
    finally:
        logging.disable(logging.NOTSET)
        sys.unraisablehook = hook


@quiet()
def block(first: int, count: int, operations: int) -> tuple[Outcome, list[str]]:
    """Some histories in one process: their sums, and one line for each that failed."""
    total, failed = Outcome(-1), list[str]()
    for seed in range(first, first + count):
        try:
            outcome = history(seed, operations)
        except Exception as error:  # noqa: BLE001  # named boundary: CLI, the table goes on
            failed.append(f"seed {seed}: {type(error).__name__}: {str(error)[:600]}")
            continue
        total.operations += outcome.operations
        total.verified += outcome.verified
        total.faults += outcome.faults
        total.reasons += outcome.reasons
    return total, failed


@quiet()
def found(bug: Bug, seeds: int, operations: int) -> int:
    """The first seed whose history fails with the bug; -1 when none does.

    Raises:
        Exception: that history fails without the bug, too, and so proves nothing.
    """
    seed = -1
    with bug.planted():
        for at in range(seeds):
            try:
                history(at, operations)
            except Exception:  # noqa: BLE001  # whatever a bug breaks
                gc.collect()
                seed = at
                break
    if seed >= 0:
        history(seed, operations)
    return seed


def found_nth(number: int, seeds: int, operations: int) -> int:
    return found(BUGS[number], seeds, operations)


def planted(executor: ProcessPoolExecutor, seeds: int, operations: int) -> int:
    """Print the table of planted bugs; the number of those not found."""
    missed = 0
    work = partial(found_nth, seeds=seeds, operations=operations)
    for bug, seed in zip(BUGS, executor.map(work, range(len(BUGS))), strict=True):
        missed += seed < 0
        say(f"{bug.kind:5}{bug.title:45}{f'seed {seed}' if seed >= 0 else 'NOT FOUND'}")
    say(f"{len(BUGS)} bugs, {missed} not found within {seeds} seeds")
    return missed


def many(executor: ProcessPoolExecutor, first: int, seeds: int, operations: int) -> int:
    """Run histories and print their sums; the number of those that failed."""
    total, failed = Outcome(-1), list[str]()
    starts = range(first, first + seeds, BLOCK)
    counts = [min(BLOCK, first + seeds - start) for start in starts]
    for outcome, lines in executor.map(partial(block, operations=operations), starts, counts):
        for line in lines:
            say(line)
        failed += lines
        total.operations += outcome.operations
        total.verified += outcome.verified
        total.faults += outcome.faults
        total.reasons += outcome.reasons
    for title, counter in (("outcome", total.reasons), ("effective fault", total.faults)):
        for name, count in sorted(Counter(counter).items()):
            say(f"{title:16}{name:32}{count:10}")
    say(
        f"{seeds} histories, {total.operations} operations, {total.verified} values verified, "
        f"{sum(total.faults.values())} effective faults, {len(failed)} failed"
    )
    return len(failed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=200, help="how many histories")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument(
        "--operations", type=int, default=OPERATIONS, help="client operations in each"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--planted", action="store_true", help="plant bugs, find each")
    options = parser.parse_args(arguments)
    begun = time.perf_counter()
    with ProcessPoolExecutor(options.jobs) as executor:
        if options.planted:
            bad = planted(executor, options.seeds, options.operations)
        else:
            bad = many(executor, options.first, options.seeds, options.operations)
    say(f"{time.perf_counter() - begun:.1f} s in {options.jobs} processes")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
