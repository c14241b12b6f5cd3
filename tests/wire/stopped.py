"""A daemon that is stopped (SIGSTOP) under clients that call everything: nobody waits beyond a deadline, all are served after it.

    python tests/wire/stopped.py [--seconds 30] [--clients 2]

So many clients of each surface (shared memory, values streamed over TCP, coroutines), a process each, go through every
call there is, one after the other, while the daemon is stopped. A client that has waited in vain leaves the daemon
alone for a while; the next call is made when that is over, so that each kind really waits, and what is called
meanwhile must come back at once. Afterwards every client must read its value again, and the daemon must hold nothing
for anybody. Prints one JSON document: per kind of call how many there were, how many waited, and the longest
against its deadline (``late, ms``; of a plain sleep in the same processes: ``late sleep, ms``). Exit status 1 when
something is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import multiprocessing
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lmcache_core.spi import LMCacheError, Refusal  # noqa: E402
from lmcache_core.wire import records, replies  # noqa: E402
from lmcache_core.wire.awaiting import AsyncDaemonClient  # noqa: E402
from lmcache_core.wire.client import DaemonClient  # noqa: E402
from tests.wire.daemons import (  # noqa: E402
    PATIENCE,
    ROOM,
    Daemon,
    check_leases,
    describe,
    free_port,
    identity_holds,
    key,
    store,
    wait_for,
)  # fmt: skip
from tests.wire.test_engines import WHOLE, register  # noqa: E402

TOKEN = "correct horse battery staple"
SURFACES = ("memory", "stream", "coroutines")
TIMEOUT, DEADLINE = 0.5, 0.3
"""Seconds of a call that takes no deadline of its own, and of one that does."""
LATE = 0.5
"""Seconds that a call may be late, and as much more as a plain sleep was: a machine that does something else."""
NBYTES = 1024
MANY = 60
"""Reservations and dispatches that each client has left for the time of the stop."""
Call = Callable[[], object]


class Caller:
    """A client of one surface, with what it needs in order to call everything."""

    def __init__(self, surface: str, number: int, path: str, port: int) -> None:
        self.streams, self.awaits = surface == "stream", surface == "coroutines"
        self.where = f"127.0.0.1:{port}" if self.streams else f"unix://{path}"
        self.first = 1000 * (number + 1)
        self.client = self.connect(PATIENCE)
        assert store(self.client, self.first, nbytes=NBYTES) == [True]
        self.held = iter(self.reserve(self.first + 100, ROOM + NBYTES))
        self.parts: Iterator[Any] = iter(())
        if not self.streams:
            self.engine = f"engine {number}"
            register(self.client, 0, engine=self.engine, ranks=1)
            self.parts = iter(self.reserve(self.first + 200, WHOLE, engine=self.engine))
        keys = [key(self.first)]
        self.leases = iter([self.client.load(keys, None).leases for _ in range(2 * MANY)])
        self.client.timeout = TIMEOUT
        self.found: dict[str, dict[str, float]] = {}
        self.late_sleep = 0.0
        self.runner = asyncio.Runner()
        self.awaited = AsyncDaemonClient(self.client)

    def connect(self, timeout: float) -> DaemonClient:
        token, transfer = (TOKEN, "tcp") if self.streams else ("", "auto")
        return DaemonClient(self.where, token=token, transfer=transfer, timeout=timeout)

    def reserve(self, first: int, nbytes: int, **how: str) -> list[Any]:
        found = self.client.reserve([(key(first + n), nbytes) for n in range(MANY)], None, **how)
        assert not any(isinstance(each, Refusal) for each in found)
        return [*found]

    def kinds(self) -> dict[str, tuple[float, Call]]:
        """Every call by name: what it may take, and how it is made."""
        client, keys, fresh = self.client, [key(self.first)], [(key(self.first + 300), 4096)]

        def of(name: str, *what: Any, **how: Any) -> Call:
            def call() -> object:
                until = time.monotonic() + DEADLINE
                if self.awaits:
                    calling = getattr(self.awaited, name)(*what, deadline=until, **how)
                    return self.runner.run(calling)
                return getattr(client, name)(*what, deadline=until, **how)

            return call

        kinds: dict[str, tuple[float, Call]] = {
            "lookup": (DEADLINE, of("lookup", keys)),
            "load": (DEADLINE, of("load", keys, None)),
            "reserve": (DEADLINE, of("reserve", fresh, None)),
            "delete": (DEADLINE, of("delete", [key(self.first + 400)])),
            "invalidate": (DEADLINE, of("invalidate", "nobody's")),
            "flush": (DEADLINE, of("flush")),
        }
        for held in itertools.islice(self.held, 1):
            kinds["commit_batch"] = DEADLINE, of("commit_batch", [held], [bytes(16)])
        if self.awaits:
            kinds["usage"] = TIMEOUT, lambda: self.runner.run(self.awaited.usage())
            return kinds
        for held in itertools.islice(self.parts, 1):
            kinds["commit_parts"] = DEADLINE, of("commit_parts", [held], [bytes(16)])
            wants = [(key(self.first + 500), WHOLE)]
            kinds["reserve, joint"] = DEADLINE, of("reserve", wants, None, engine=self.engine)
        return kinds | {
            "dispatch": (TIMEOUT, self.hand_over),
            "usage": (TIMEOUT, client.usage),
            "prefetch": (TIMEOUT, lambda: client.prefetch(keys, 1.0)()),
            "describe": (TIMEOUT, lambda: client.ask(replies.Document, records.Describe)),
            "report_prefill": (TIMEOUT, lambda: client.report_prefill(100, 1.0)),
            "connect and close": (TIMEOUT + DEADLINE, self.come_and_go),
        }

    def hand_over(self) -> None:
        """Dispatch to an engine of which this process is the only rank; what it adopts it ends."""
        for leases in itertools.islice(self.leases, 1):
            handle = self.client.dispatch("nobody", leases, 1)
            if handle is not None:
                self.client.release(self.client.adopt(handle) or ())

    def come_and_go(self) -> None:
        self.connect(TIMEOUT).close(deadline=time.monotonic() + DEADLINE)

    def timed(self, name: str, allowed: float, call: Call) -> None:
        begun = time.monotonic()
        with suppress(LMCacheError):
            call()
        spent = time.monotonic() - begun
        row = self.found.setdefault(name, {"calls": 0, "waited": 0, "late, ms": -1e9})
        row["calls"] += 1
        row["waited"] += spent > allowed / 2
        row["late, ms"] = max(row["late, ms"], round((spent - allowed) * 1e3, 1))

    def live(self, over: Any, turn: int) -> None:
        """Call everything again and again until it is over; in the pauses that a client makes of itself, look up."""
        client, keys = self.client, [key(self.first)]
        while not over.is_set():
            kinds = [*self.kinds().items()]
            for name, (allowed, call) in kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]:
                while client.now() < client._quiet_until and not over.is_set():
                    self.timed(
                        "lookup in a pause",
                        0.01,
                        lambda: client.lookup(keys, deadline=time.monotonic() + 0.01),
                    )
                    slept = time.monotonic()
                    time.sleep(0.02)
                    late = time.monotonic() - slept - 0.02
                    self.late_sleep = max(self.late_sleep, round(late * 1e3, 1))
                if over.is_set():
                    return
                self.timed(name, allowed, call)

    def served(self) -> bool:
        """Whether this client reads its value."""
        leases = self.client.load([key(self.first)], None).leases
        if leases:
            check_leases(leases, [self.first])
            self.client.release(leases)
        return bool(leases)

    def end(self) -> None:
        for each in (*self.held, *self.parts):
            self.client.abort(each)
        for each in self.leases:
            self.client.release(each)
        self.runner.run(self.awaited.close())
        self.runner.close()


def live(surface: str, number: int, path: str, port: int, ready: Any, over: Any, told: Any) -> None:
    """Body of a client process."""
    logging.getLogger("lmcache").setLevel(logging.ERROR)  # that nobody answers is the point
    caller = Caller(surface, number, path, port)
    ready.wait()  # all are, and then the daemon is stopped
    ready.wait()
    caller.live(over, 3 * number)
    begun = time.monotonic()
    wait_for(caller.served, what="the first value after the stop")
    back = time.monotonic() - begun
    caller.end()
    told.put((caller.found, back, caller.late_sleep))


def stop(seconds: float, clients: int) -> dict[str, Any]:
    """Stop a daemon for so long under so many clients of each surface; the findings, ``wrong`` empty when all is well."""
    context = multiprocessing.get_context("spawn")
    ready, over = context.Barrier(len(SURFACES) * clients + 1), context.Event()
    told = context.Queue()
    rows: dict[str, dict[str, float]] = {}
    back = late_sleep = 0.0
    flags = ("--arena-mode", "shared-rw")
    with tempfile.TemporaryDirectory(prefix="lmcache-stop-") as folder, Daemon(
        folder, *flags, size="0.0625", port=free_port(), token=TOKEN
    ) as daemon:  # fmt: skip
        where = daemon.path, daemon.port, ready, over, told
        processes = [
            context.Process(target=live, args=(surface, number, *where), daemon=True)
            for number, surface in enumerate(SURFACES * clients)
        ]
        for process in processes:
            process.start()
        ready.wait(3 * PATIENCE)
        daemon.send(signal.SIGSTOP)
        ready.wait(PATIENCE)
        time.sleep(seconds)
        daemon.send(signal.SIGCONT)
        over.set()
        for _ in processes:
            found, came_back, slept = told.get(timeout=2 * PATIENCE)
            back, late_sleep = max(back, came_back), max(late_sleep, slept)
            for name, row in found.items():
                whole = rows.setdefault(name, dict(row, calls=0, waited=0))
                for what in ("calls", "waited"):
                    whole[what] += row[what]
                whole["late, ms"] = max(whole["late, ms"], row["late, ms"])
        for process in processes:
            process.join(PATIENCE)
        watcher = daemon.client(timeout=PATIENCE)

        def held() -> int:
            memory = describe(watcher)["memory"]
            return int(sum(memory[state] for state in ("reserved", "quarantined", "leased")))

        wait_for(lambda: not held(), what="the end of what was held")
        memory, text = describe(watcher)["memory"], daemon.log.read_text()
        watcher.close()
    most = LATE * 1e3 + late_sleep
    late = {name: row["late, ms"] for name, row in rows.items() if row["late, ms"] > most}
    idle = [name for name, row in rows.items() if not row["waited"] and name not in AT_ONCE]
    wrong = {
        "a client failed": any(process.exitcode for process in processes),
        f"calls outlasted their deadlines: {late}": late,
        f"nobody waited in: {idle}": idle if seconds >= 20 else (),
        "the capacity identity is broken": not identity_holds(memory),
        "the daemon logged an error": "Traceback" in text or "ERROR" in text,
    }
    return {
        "stopped, s": seconds, "clients": len(processes), "timeout, s": TIMEOUT,
        "deadline, s": DEADLINE, "calls": rows,
        "late, ms": max(row["late, ms"] for row in rows.values()), "late sleep, ms": late_sleep,
        "served again after, s": round(back, 3),
        "wrong": [what for what, so in wrong.items() if so],
    }  # fmt: skip


AT_ONCE = ("report_prefill", "dispatch", "lookup in a pause")
"""Kinds that wait for no answer."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Stop a daemon under its clients.")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--clients", type=int, default=2)
    given = parser.parse_args()
    logging.getLogger("lmcache").setLevel(logging.ERROR)
    found = stop(given.seconds, given.clients)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return int(bool(found["wrong"]))


if __name__ == "__main__":
    raise SystemExit(main())
