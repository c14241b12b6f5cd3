"""A daemon under load for a long time, or killed again and again: no wrong byte, nothing that grows, nobody who waits.

    python tests/wire/soak.py [--seconds 30] [--operations 0] [--clients 2]
    python tests/wire/soak.py --kills 200

Clients store, read back, look up, delete, abort and list at random, part and come again; others are killed holding
leases and reservations. Every value read is compared. The first form runs for so long and until so many operations
are done, then compares the daemon's own memory, descriptors and threads with those it had after the first quarter. The
second kills the daemon (SIGKILL) and starts it again; every client must be served by the successor within two seconds
and no call may take longer than its deadline. Prints one JSON document; exit status 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import random
import re
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lmcache_core.spi import Refusal  # noqa: E402
from lmcache_core.wire import records, replies  # noqa: E402
from lmcache_core.wire.client import DaemonClient  # noqa: E402
from tests.wire.daemons import (  # noqa: E402
    ROOM,
    Daemon,
    check_leases,
    describe,
    fill,
    identity_holds,
    key,
    wait_for,
)  # fmt: skip
from tests.wire.test_death import Client as Hostile  # noqa: E402

SIZES = (1024, 4096, 4096, 16_384, 65_536)
VALUES = 1500
TIMEOUT = 1.0
GROWTH = 8 << 20
"""Bytes of its own memory a daemon may gain after the first quarter, however long the rest is."""


class Timed:
    """A client whose calls are timed, one by one."""

    def __init__(self, client: DaemonClient) -> None:
        self.client = client
        self.longest = 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.client, name)
        if not callable(found):
            return found

        def call(*args: object, **named: object) -> object:
            begun = time.monotonic()
            try:
                return found(*args, **named)
            finally:
                self.longest = max(self.longest, time.monotonic() - begun)

        return call


def operate(client: Timed, choice: random.Random) -> None:
    """One operation of a client."""
    number = choice.randrange(VALUES)
    run = range(number, number + choice.randrange(1, 9))
    keys = [key(each) for each in run]
    what = choice.random()
    if what < 0.45:
        loaded = client.load(keys, None)
        check_leases(loaded.leases, run[: len(loaded.leases)])
        client.release(loaded.leases)
    elif what < 0.8:
        nbytes = ROOM + choice.choice(SIZES)
        held = client.reserve([(each, nbytes) for each in keys], None)
        good = [(n, h) for n, h in zip(run, held, strict=True) if not isinstance(h, Refusal)]
        if choice.random() < 0.1:
            for _, each in good:
                client.abort(each)
        elif good:
            client.commit_batch([h for _, h in good], [fill(h, n) for n, h in good])
    elif what < 0.95:
        client.lookup(keys)
    elif what < 0.98:
        client.delete(keys[:1])
    elif client.home is not None:
        client.usage()


def load(path: str, seed: int, stop: Any, done: Any, worst: Any) -> None:
    """Body of a client process: operate until told to stop, count, note the longest call."""
    choice = random.Random(seed)
    logging.getLogger("lmcache").setLevel(logging.ERROR)  # that the daemon is gone is the point
    client = Timed(DaemonClient(f"unix://{path}", timeout=TIMEOUT))
    while not stop.is_set():
        if choice.random() < 0.002:
            client.client.close()
            client.client = DaemonClient(f"unix://{path}", timeout=TIMEOUT)
        operate(client, choice)
        with done.get_lock():
            done.value += 1
            worst.value = max(worst.value, client.longest)
        if client.home is None:
            time.sleep(0.001)  # whoever misses computes, and that takes time
    client.close()
    threads = [each.name for each in threading.enumerate() if each.name.startswith("lmcache")]
    assert not threads, threads


class Crowd:
    """Client processes under one daemon."""

    def __init__(self, path: str, clients: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.stop = context.Event()
        self.done, self.worst = context.Value("q", 0), context.Value("d", 0.0)
        self.processes = [
            context.Process(
                target=load, args=(path, seed, self.stop, self.done, self.worst), daemon=True
            )
            for seed in range(clients)
        ]
        for process in self.processes:
            process.start()

    def end(self) -> bool:
        """Whether all ended well."""
        self.stop.set()
        for process in self.processes:
            process.join(30)
        return all(process.exitcode == 0 for process in self.processes)


def usage(pid: int) -> dict[str, int]:
    """What a process has of its own: bytes, descriptors, threads."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = {
        name: int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("RssAnon", "Threads")
    }  # type: ignore[index]
    return {
        "bytes": found["RssAnon"] << 10,
        "threads": found["Threads"],
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
    }


def start(folder: str) -> Daemon:
    disk = ("--l2-disk-path", f"{folder}/kv", "--l2-disk-size-gb", "0.125")
    return Daemon(folder, "--arena-mode", "shared-rw", *disk, size="0.0625")


def soak(seconds: float, operations: int, clients: int) -> dict[str, Any]:
    """Run for so long and so much; the findings, ``wrong`` empty when all is well."""
    with tempfile.TemporaryDirectory(prefix="lmcache-soak-") as folder, start(folder) as daemon:
        watcher = daemon.client(timeout=5)
        alone = usage(daemon.pid)
        crowd = Crowd(daemon.path, clients)
        begun, quarter, killed = time.monotonic(), None, 0
        while (spent := time.monotonic() - begun) < seconds or crowd.done.value < operations:
            if not all(process.is_alive() for process in crowd.processes):
                break
            if quarter is None and spent > seconds / 4:
                quarter = usage(daemon.pid)
            with Hostile(daemon) as victim:
                victim.do(f"lease {killed % 50}")
                victim.do(f"reserve {100_000 + killed}")
                time.sleep(0.5)
            killed += 1
            watcher.ask(replies.Values, lambda id: records.List(id, limit=1000))
            watcher.ask(replies.Metered, records.Stats)
        good = crowd.end()
        wait_for(lambda: len(describe(watcher)["clients"]) == 1, 10, "the end of all sessions")
        document, last = describe(watcher), usage(daemon.pid)
        quarter = quarter or last
        memory, text = document["memory"], daemon.log.read_text()
        held = {state: memory[state] for state in ("reserved", "quarantined", "leased")}
        wrong = [
            what
            for what, so in {
                "a client failed": not good,
                "a call took too long": crowd.worst.value > 1.5 * TIMEOUT,
                "the daemon's own memory grew": last["bytes"] - quarter["bytes"] > GROWTH,
                "descriptors are left": last["descriptors"] > alone["descriptors"] + 16,
                "threads are left": last["threads"] > quarter["threads"] + 1,
                "memory is held by nobody": any(held.values()),
                "the capacity identity is broken": not identity_holds(memory),
                "the daemon logged an error": "Traceback" in text or "ERROR" in text,
            }.items()
            if so
        ]
        watcher.close()
        return {
            "seconds": round(spent), "operations": crowd.done.value, "killed clients": killed,
            "longest call, ms": round(crowd.worst.value * 1e3, 1), "turns": document["turns"],
            "at first": alone, "after a quarter": quarter, "in the end": last, "held": held,
            "wrong": wrong,
        }  # fmt: skip


def kill(kills: int, clients: int) -> dict[str, Any]:
    """Kill the daemon again and again under load."""
    choice = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="lmcache-kill-") as folder, start(folder) as daemon:
        watcher = daemon.client(timeout=TIMEOUT)
        crowd = Crowd(daemon.path, clients)
        back, starts, wrong = [], [], []
        for number in range(kills):
            time.sleep(choice.uniform(0.05, 0.5))
            boot = watcher.home.boot if watcher.home else b""
            killed = time.monotonic()
            daemon.kill()
            daemon.start()
            begun = time.monotonic()
            starts.append(begun - killed)
            wait_for(lambda: watcher.home is not None and watcher.home.boot != boot, 10)  # noqa: B023
            back.append(time.monotonic() - begun)
            if not all(process.is_alive() for process in crowd.processes):
                wrong.append(f"a client failed after kill {number}")
                break
        if not crowd.end():
            wrong.append("a client failed")
        wait_for(lambda: len(describe(watcher)["clients"]) == 1, 10, "the end of all sessions")
        memory = describe(watcher)["memory"]
        if memory["reserved"] or memory["leased"] or not identity_holds(memory):
            wrong.append(f"memory is not what it was: {memory}")
        if max(back, default=0) > 2:
            wrong.append("a client came back too late")
        if crowd.worst.value > 1.5 * TIMEOUT:
            wrong.append("a call took too long")
        watcher.close()
        return {
            "kills": len(back), "operations": crowd.done.value,
            "longest start, s": round(max(starts, default=0), 3),
            "longest way back, s": round(max(back, default=0), 3),
            "longest call, ms": round(crowd.worst.value * 1e3, 1), "wrong": wrong,
        }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Soak a daemon, or kill it again and again.")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--operations", type=int, default=0)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--kills", type=int, default=0)
    given = parser.parse_args()
    logging.getLogger("lmcache").setLevel(logging.ERROR)
    if given.kills:
        found = kill(given.kills, given.clients)
    else:
        found = soak(given.seconds, given.operations, given.clients)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return int(bool(found["wrong"]))


if __name__ == "__main__":
    raise SystemExit(main())
