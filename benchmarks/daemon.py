"""The daemon against what the hardware does: round trips, copies, streams, many clients, deaths.

``python benchmarks/daemon.py [--quick] [--json FILE]`` starts its own daemons and measures everything in one run, A and
B in turns. A row is a figure, its bar, and whether it holds here and now; on a machine that is busy with other
things the ratios mean more than the microseconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from daemon_rig import (
    TOKEN,
    connect,
    cpu,
    daemon,
    fetch,
    key,
    memory,
    percentiles,
    send,
    shared,
    store,
    timed,
    touched,
)  # fmt: skip

sys.path.insert(0, str(Path(__file__).parents[1]))

from lmcache_core import ops
from lmcache_core.spi import Key
from lmcache_core.wire import records, replies
from lmcache_core.wire.client import DaemonClient
from tests.wire.dealing import hit_rate, recorded

SMALL = 8192
PREFIX = 16, (64 << 20) // 16
"""Chunks and bytes of the 4 k-token prefix: 67 MB."""
Row = tuple[str, float, str, str, bool | None]


def storm(path: str, until: float) -> None:
    """Evict, list and scrape as fast as one client can."""
    client = connect(path)
    number = 0
    while time.monotonic() < until:
        store(client, [key(number + at, 7) for at in range(8)], 1 << 20)
        number += 8
        client.ask(replies.Values, lambda id: records.List(id, limit=1000))
        client.ask(replies.Metered, records.Stats)
    client.close()


def round_trips(rows: list[Row], count: int) -> None:
    with daemon("--arena-mode", "shared-rw") as (path, _, _):
        client = connect(path)
        touched(client)  # memory is populated in the background at first, on both sides
        keys = [key(number) for number in range(391)]
        for at in range(0, 391, 100):
            store(client, keys[at : at + 100], SMALL)

        def lookup(some: list[Key]) -> None:
            loaded = client.load(some, None)
            assert len(loaded.leases) == len(some)
            client.release(loaded.leases)

        p50, p99 = percentiles(lambda: client.ask(replies.Done, records.Ping), count)
        rows.append(("ping, p50", p50, "ms", "", None))
        for chunks, bar in ((16, 0.12), (391, 0.9)):
            p50, p99 = percentiles(lambda n=chunks: lookup(keys[:n]), count)  # type: ignore[misc]
            rows.append(
                (f"lookup of {chunks} chunks with leases, p50", p50, "ms", f"<= {bar}", p50 <= bar)
            )
            rows.append(
                (f"lookup of {chunks} chunks with leases, p99", p99, "ms", "<= 1", p99 <= 1)
            )
        noise = multiprocessing.Process(
            target=storm, args=(path, time.monotonic() + count / 1000 + 1.5)
        )
        noise.start()
        time.sleep(0.7)
        store(client, keys[:16], SMALL)  # what nobody asked for meanwhile has been evicted
        p50, p99 = percentiles(lambda: lookup(keys[:16]), count)
        noise.join()
        rows.append(("16 chunks during evictions, listings, scrapes, p50", p50, "ms", "", None))
        rows.append(
            ("16 chunks during evictions, listings, scrapes, p99", p99, "ms", "<= 1", p99 <= 1)
        )
        client.close()


def copies(rows: list[Row], laps: int) -> None:
    """Store and load of a prefix in the daemon's memory, against memcpy between maps of the same kind."""
    chunks, nbytes = PREFIX
    total = chunks * nbytes
    with daemon("--arena-mode", "shared-rw", gib=0.5) as (path, _, _):
        client = connect(path)
        source, between, target = shared(total), shared(total), shared(total)
        ratios: dict[str, list[float]] = {"store": [], "load": [], "both": []}
        for lap in range(laps + 1):
            keys = [key(number, lap + 100) for number in range(chunks)]
            plain_put = timed(lambda: ops.copy(between, source))
            plain_got = timed(lambda: ops.copy(target, between))
            put = timed(lambda k=keys: store(client, k, nbytes, source))  # type: ignore[misc]
            got = timed(lambda k=keys: fetch(client, k, nbytes, target))  # type: ignore[misc]
            if lap:  # the first pays for its pages
                ratios["store"].append(plain_put / put)
                ratios["load"].append(plain_got / got)
                ratios["both"].append((plain_put + plain_got) / (put + got))
            else:
                rows.append(
                    (
                        "67 MB through memory, first lap",
                        (plain_put + plain_got) / (put + got),
                        "of memcpy",
                        "",
                        None,
                    )
                )
            client.delete(keys)
            touched(
                client
            )  # from then on: what is touched meanwhile in the background is in nobody's way
        for name, found in ratios.items():
            ratio = statistics.median(found)
            bar = 0.8 if name == "both" else None
            rows.append((f"67 MB through memory, {name}", ratio, "of memcpy",
                         f">= {bar}" if bar else "", ratio >= bar if bar else None))  # fmt: skip
        client.close()


def plain_sender(port: int, total: int, laps: int) -> None:
    data = shared(total)
    data[:] = os.urandom(1 << 20) * (total >> 20)  # untouched memory would be one page of zeros
    with socket.create_connection(("127.0.0.1", port)) as sock:
        for _ in range(laps):
            sock.recv(1)
            sock.sendall(data)


def streams(rows: list[Row], laps: int) -> None:
    """Load of a prefix over TCP, against a process that does nothing but send the same bytes."""
    chunks, nbytes = PREFIX
    total = chunks * nbytes
    with daemon(gib=0.5) as (_, port, _), socket.create_server(("127.0.0.1", 0)) as listener:
        client = DaemonClient(f"127.0.0.1:{port}", token=TOKEN, transfer="tcp", timeout=20)
        while client.home is None:
            time.sleep(0.01)
        sender = multiprocessing.Process(
            target=plain_sender, args=(listener.getsockname()[1], total, laps + 1)
        )
        sender.start()
        sock, _ = listener.accept()
        keys = [key(number) for number in range(chunks)]
        source = shared(total)
        source[:] = os.urandom(1 << 20) * (total >> 20)
        assert send(client, [key(number, 1) for number in range(chunks)], nbytes, source) == chunks
        touched(client)
        put = timed(lambda: send(client, keys, nbytes, source))
        loads: list[float] = []
        plains: list[float] = []
        for lap in range(laps + 1):

            def plain() -> None:
                sock.sendall(b"x")
                for _ in keys:
                    view = memoryview(bytearray(nbytes))
                    have = 0
                    while have < nbytes:
                        have += sock.recv_into(view[have:], 0, socket.MSG_WAITALL)

            counts: list[int] = []

            def load(counts: list[int] = counts) -> None:
                leases = client.load(keys, None).leases
                counts.append(len(leases))
                client.release(leases)

            ours = timed(load)
            assert counts == [chunks], "a miss is quick and no load"
            theirs = timed(plain)
            if lap:
                loads.append(ours)
                plains.append(theirs)
        sender.join()
        sock.close()
        ratio = statistics.median(plains) / statistics.median(loads)
        rows.append(("67 MB over TCP, load", ratio, "of a plain socket", ">= 0.7", ratio >= 0.7))
        rows.append(
            ("67 MB over TCP, load", total / statistics.median(loads) / 1e9, "GB/s", "", None)
        )
        rows.append(("67 MB over TCP, store", total / put / 1e9, "GB/s", "", None))
        client.close()


def asker(path: str, seconds: float, counts: Any) -> None:
    client = connect(path)
    keys = [key(number) for number in range(100)]
    done, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        loaded = client.load(keys, None)
        assert len(loaded.leases) == 100
        client.release(loaded.leases)
        done += 1
    counts.put(done / seconds)
    client.close()


def many(rows: list[Row], seconds: float) -> None:
    with daemon("--arena-mode", "shared-rw", gib=0.125) as (path, _, process):
        client = connect(path)
        store(client, [key(number) for number in range(100)], SMALL)
        counts: Any = multiprocessing.Queue()
        before = cpu(process.pid)
        askers = [
            multiprocessing.Process(target=asker, args=(path, seconds, counts)) for _ in range(4)
        ]
        for each in askers:
            each.start()
        rate = sum(counts.get() for _ in askers)
        for each in askers:
            each.join()
        used = (cpu(process.pid) - before) / (rate * seconds) * 1e6
        rows.append(
            ("lookups of 100 chunks by 4 clients", rate, "per second", ">= 5000", rate >= 5000)
        )
        rows.append(
            ("the daemon's CPU per lookup of 100 chunks", used, "us", "<= 150", used <= 150)
        )
        client.close()


def hit_rates(requests: int) -> tuple[float, float]:
    """Of one client and of eight, on the recorded conversations, in a pool for a tenth of their values."""
    asked, gib = recorded(requests, 0.1)
    rates = []
    for count in (1, 8):
        with daemon("--arena-mode", "shared-rw", gib=gib) as (path, _, _):
            clients = [connect(path, timeout=10) for _ in range(count)]
            rates.append(hit_rate(clients, asked))
            for client in clients:
                client.close()
    return rates[0], rates[1]


def victim(path: str, ready: Any) -> None:
    client = connect(path)
    client.reserve([(key(number, 9), 1 << 20) for number in range(8)], None)
    client.load([key(0)], None)
    ready.set()
    time.sleep(60)


def deaths(rows: list[Row], laps: int) -> None:
    with daemon("--arena-mode", "shared-rw", gib=0.125) as (path, _, process):
        client = connect(path, timeout=0.5)
        store(client, [key(0)], SMALL)
        spent = []
        for _ in range(laps):
            ready = multiprocessing.Event()
            child = multiprocessing.Process(target=victim, args=(path, ready))
            child.start()
            ready.wait()
            child.kill()
            child.join()
            begun = time.perf_counter()
            while memory(client)["reserved"] or memory(client)["leased"]:
                pass
            spent.append(time.perf_counter() - begun)
        rows.append(
            (
                "kill -9 of a client: memory is back after",
                max(spent) * 1e3,
                "ms",
                "<= 1000",
                max(spent) < 1,
            )
        )
        process.kill()
        process.wait()
        client.load([key(0)], None)
        _, p99 = percentiles(lambda: client.load([key(0)], None), 1000)
        rows.append(("absent daemon: a miss takes, p99", p99, "ms", "<= 1", p99 <= 1))
        again = subprocess.Popen(process.args, stderr=subprocess.DEVNULL)
        try:
            while True:  # the moment it serves again
                with socket.socket(socket.AF_UNIX) as probe:
                    if probe.connect_ex(path) == 0:
                        break
                time.sleep(0.002)
            begun = time.perf_counter()
            while client.home is None:
                time.sleep(0.001)
            back = time.perf_counter() - begun
            rows.append(
                ("restarted daemon: registered again after", back * 1e3, "ms", "<= 2000", back <= 2)
            )
        finally:
            again.kill()
            again.wait()
        client.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="fewer laps")
    parser.add_argument("--json", metavar="FILE", help="write the rows there, too")
    given = parser.parse_args()
    rows: list[Row] = []
    round_trips(rows, 500 if given.quick else 3000)
    copies(rows, 5 if given.quick else 15)
    streams(rows, 3 if given.quick else 9)
    many(rows, 1.0 if given.quick else 4.0)
    one, eight = hit_rates(500 if given.quick else 4000)
    rows.append(
        (
            "hit rate of 8 clients less that of one",
            (eight - one) * 100,
            "pp",
            "within 1",
            abs(eight - one) <= 0.01,
        )
    )
    rows.append(("hit rate of one client", one * 100, "%", "", None))
    deaths(rows, 2 if given.quick else 5)
    for name, figure, unit, bar, good in rows:
        verdict = "" if good is None else "ok" if good else "MISSED"
        print(f"{name:<56}{figure:>11.3f} {unit:<18}{bar:<10}{verdict}")
    if given.json:
        Path(given.json).write_text(json.dumps([
            dict(zip(("name", "figure", "unit", "bar", "good"), row, strict=True)) for row in rows
        ], indent=1))  # fmt: skip
    return int(any(good is False for *_, good in rows))


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    assert threading.active_count() == 1
    raise SystemExit(main())
