"""Faults on the real thing: a daemon, four clients, a real Redis, a real disk, and everything that happens to them.

    python tests/chaos/run.py [--seconds 30] [--seed 0] [--clients 4]

Faults come one after another in an order drawn from the seed, in whole rounds of all kinds. During each
one every byte that a client reads is compared and every call is timed; afterwards the clients must be served again at
their old rate within five seconds. Prints one row per kind; exit status 1 when anything was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lmcache_backend_redis.serving import START, RedisServer, find_server  # noqa: E402

from lmcache_core.testing.services import free_port, need_service  # noqa: E402
from tests.chaos.crowd import TIMEOUT, Crowd, percentile  # noqa: E402
from tests.chaos.proxy import Proxy  # noqa: E402
from tests.wire.daemons import Daemon, describe, identity_holds, wait_for  # noqa: E402
from tests.wire.test_death import Client as Hostile  # noqa: E402

DISK = 24 << 20
RECOVERY = 5.0
"""Seconds after the end of a fault within which the clients are served as before."""
ENOUGH = 0.4
"""Share of the rate before the first fault that counts as served as before; other processes share the machine."""
SLACK = 1.0
"""Seconds a call may be over its deadline: the processor may be elsewhere."""


@dataclass(slots=True)
class Row:
    """What one kind of fault did."""

    kind: str
    times: int = 0
    calls: int = 0
    lookup_p99_ms: float = 0.0
    longest_ms: float = 0.0
    back_s: float = 0.0
    breaker: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)


class Scene:
    """Everything that runs, and the faults that can happen to it: each a context whose end undoes it."""

    def __init__(self, folder: Path, clients: int, choice: random.Random) -> None:
        self.folder, self.choice = folder, choice
        with contextlib.ExitStack() as undo:
            self.redis = RedisServer(str(find_server("redis-server")), folder, "--maxmemory", "48mb",
                                     "--maxmemory-policy", "allkeys-lru", port=free_port())  # fmt: skip
            undo.callback(self.redis.kill)
            self.redis.start()
            self.proxy = Proxy(("127.0.0.1", self.redis.port))
            undo.callback(self.proxy.close)
            self.disk = folder / "disk"
            self.disk.mkdir()
            if _mount(self.disk):
                undo.callback(subprocess.run, ["umount", "-l", str(self.disk)], check=False)
            file = folder / "lmcache.yaml"
            tiers = [
                {"cpu": {"size": "16MiB"}},
                {"disk": {"path": str(self.disk), "size": f"{DISK >> 20}MiB", "deadline": "300ms"}},
                {"redis": {"url": f"redis://127.0.0.1:{self.proxy.port}", "deadline": "300ms"}},
            ]
            file.write_text(json.dumps({"tiers": tiers, "manager": {"cost_gate": False}}))
            self.daemon = Daemon(folder, "--arena-mode", "shared-rw", "--config", str(file))
            undo.callback(self.daemon.kill)
            self.watcher = self.daemon.client(timeout=5)
            undo.callback(self.watcher.close)
            self.crowd = Crowd(self.daemon.path, clients)
            self._undo = undo.pop_all()

    def close(self) -> bool:
        good = self.crowd.end()
        self._undo.close()
        return good

    def breaker(self) -> str:
        """State of the breaker of redis, as operators see it."""
        tiers = {each["name"]: each for each in describe(self.watcher)["tiers"]}
        return str(tiers["redis"]["breaker"])

    # -- faults --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def redis_killed(self) -> Iterator[None]:
        self.redis.kill()
        yield
        self.redis.start()

    @contextlib.contextmanager
    def redis_hung(self) -> Iterator[None]:
        self.redis.suspend()
        yield
        self.redis.resume()

    @contextlib.contextmanager
    def redis_slow(self) -> Iterator[None]:
        self.proxy.delay = 0.2
        yield
        self.proxy.delay = 0.0

    @contextlib.contextmanager
    def redis_garbage(self) -> Iterator[None]:
        self.proxy.garble = True
        yield
        self.proxy.garble = False

    @contextlib.contextmanager
    def connections_cut(self) -> Iterator[None]:
        self.proxy.cut()
        yield
        self.proxy.cut()

    @contextlib.contextmanager
    def network_stalled(self) -> Iterator[None]:
        self.proxy.stalled = True
        yield
        self.proxy.stalled = False

    @contextlib.contextmanager
    def disk_full(self) -> Iterator[None]:
        filler = self.disk / "filler"
        with contextlib.suppress(OSError), open(filler, "wb") as file:
            while True:
                file.write(bytes(1 << 16))
        yield
        filler.unlink()

    @contextlib.contextmanager
    def disk_rots(self) -> Iterator[None]:
        """Flip a bit in many files, and set the clock of others to another year."""
        for path in self.disk.rglob("*"):
            if len(path.name) > 100 and self.choice.random() < 0.3:
                with contextlib.suppress(OSError):
                    if self.choice.random() < 0.5:
                        os.utime(path, (self.choice.choice([0, 4e9]),) * 2)
                        continue
                    with open(path, "r+b") as file:
                        at = self.choice.randrange(path.stat().st_size)
                        file.seek(at)
                        byte = file.read(1)[0] ^ 1 << self.choice.randrange(8)
                        file.seek(at)
                        file.write(bytes([byte]))
        yield

    @contextlib.contextmanager
    def client_killed(self) -> Iterator[None]:
        with Hostile(self.daemon) as victim:
            victim.do("lease 1")
            victim.do("reserve 100000")
            yield

    @contextlib.contextmanager
    def daemon_hung(self) -> Iterator[None]:
        self.daemon.send(signal.SIGSTOP)
        yield
        self.daemon.send(signal.SIGCONT)

    @contextlib.contextmanager
    def daemon_killed(self) -> Iterator[None]:
        self.daemon.kill()
        yield
        self.daemon.start()
        wait_for(lambda: self.watcher.home is not None, RECOVERY)


FAULTS: dict[str, Callable[[Scene], contextlib.AbstractContextManager[None]]] = {
    name: call for name, call in vars(Scene).items() if name.split("_")[0] in (
        "redis", "connections", "network", "disk", "client", "daemon",
    )
}  # fmt: skip
REMOTE = ("redis", "connections", "network")
SILENT = ("daemon_hung", "daemon_killed")
"""Faults during which the daemon itself cannot be asked."""


def _mount(folder: Path) -> bool:
    """A small file system of its own where that is allowed; else the limit of the tier is what fills up."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK * 3 // 4}", "tmpfs", str(folder)],
        check=False, capture_output=True,
    )  # fmt: skip
    return done.returncode == 0


def play(seconds: float, seed: int, clients: int) -> list[Row]:
    """Run it; one row per kind of fault."""
    rows = {kind: Row(kind) for kind in FAULTS}
    last = rows["redis_killed"]
    choice = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="lmcache-chaos-") as folder:
        scene = Scene(Path(folder), clients, choice)
        try:
            wait_for(lambda: scene.crowd.served > 500, 30, "the first hits")
            usual = _rate(scene, 1.0)
            scene.crowd.worst()
            until = time.monotonic() + seconds
            while time.monotonic() < until and scene.crowd.good:
                for kind in choice.sample(list(FAULTS), len(FAULTS)):
                    last = rows[kind]
                    _one(scene, last, usual)
                    if not scene.crowd.good:
                        last.wrong.append("a client saw a wrong byte, or failed")
                        break
            _settled(scene, last)
        finally:
            good = scene.close()
        if not good:
            last.wrong.append("a client failed in the end")
    return list(rows.values())


def _one(scene: Scene, row: Row, usual: float) -> None:
    """One fault, and the way back."""
    before = {verb: scene.crowd.counts(verb) for verb in ("lookup", "load", "store")}
    with FAULTS[row.kind](scene):
        end = time.monotonic() + scene.choice.uniform(0.5, 1.5)
        while time.monotonic() < end:
            time.sleep(0.05)
            if row.kind not in SILENT:
                row.breaker.add(scene.breaker())
    begun = time.monotonic()
    rate = _rate(scene, 0.25)
    while rate < ENOUGH * usual and time.monotonic() < begun + RECOVERY + SLACK:
        rate = _rate(scene, 0.25)
    if row.kind.startswith(REMOTE):
        with contextlib.suppress(AssertionError):
            wait_for(lambda: scene.breaker() == "closed", begun + RECOVERY - time.monotonic())
        if (state := scene.breaker()) != "closed":
            row.wrong.append(f"the breaker of redis is {state} {RECOVERY:g} s later")
    row.times += 1
    row.back_s = max(row.back_s, round(time.monotonic() - begun, 2))
    if row.back_s > RECOVERY + SLACK:
        row.wrong.append(f"served {rate:.0f} values/s {row.back_s} s later, {usual:.0f} before")
    spent = {
        verb: [now - then for now, then in zip(scene.crowd.counts(verb), before[verb], strict=True)]
        for verb in before
    }
    row.calls += sum(map(sum, spent.values()))
    p99 = percentile(spent["lookup"], 0.99)
    row.lookup_p99_ms = max(row.lookup_p99_ms, round(p99 * 1e3, 2))
    if row.kind.startswith(REMOTE) and p99 > TIMEOUT:
        row.wrong.append(f"a lookup in a hundred took {p99:.2f} s, its deadline was {TIMEOUT:g} s")
    longest = scene.crowd.worst()
    row.longest_ms = max(row.longest_ms, round(longest * 1e3, 1))
    if longest > TIMEOUT + SLACK:
        row.wrong.append(f"a call took {longest:.2f} s, its deadline was {TIMEOUT:g} s")


def _rate(scene: Scene, seconds: float) -> float:
    before, begun = scene.crowd.served, time.monotonic()
    time.sleep(seconds)
    return (scene.crowd.served - before) / (time.monotonic() - begun)


def _settled(scene: Scene, row: Row) -> None:
    """When all is over memory is where it belongs."""
    scene.crowd.end()
    wait_for(lambda: len(describe(scene.watcher)["clients"]) == 1, 10, "the end of all sessions")
    memory: dict[str, int] = {}

    def free() -> bool:
        memory.update(describe(scene.watcher)["memory"])
        return not memory["reserved"] and not memory["leased"]

    with contextlib.suppress(AssertionError):
        wait_for(free, 10)  # what is still being written to tiers is leased for that long
    if not free() or not identity_holds(memory):
        row.wrong.append(f"memory is not what it was: {memory}")


def table(rows: list[Row]) -> str:
    """For people."""
    lines = [
        f"{'fault':17}{'times':>6}{'calls':>9}{'lookup p99':>12}{'longest':>10}{'back in':>9}  breaker"
    ]
    lines += [
        f"{r.kind:17}{r.times:6}{r.calls:9}{r.lookup_p99_ms:9} ms{r.longest_ms:7} ms{r.back_s:7} s  "
        + ", ".join(sorted(r.breaker))
        for r in rows
    ]
    lines.append(
        f"deadline of a call {TIMEOUT * 1e3:g} ms; to be back to {ENOUGH:.0%} of the rate in {RECOVERY:g} s"
    )
    lines += [f"WRONG: {row.kind}: {what}" for row in rows for what in row.wrong]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Faults on the real thing.")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=4)
    given = parser.parse_args()
    logging.getLogger("lmcache").setLevel(logging.CRITICAL)
    need_service(
        "redis", None if find_server("redis-server") else "no redis-server here", start=START
    )
    rows = play(given.seconds, given.seed, given.clients)
    sys.stdout.write(table(rows) + "\n")
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
