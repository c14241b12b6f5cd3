"""`make bench-vllm`: what a hit in our cache costs beside a hit in vLLM's own, in one engine, in pairs.

    python .ci/vllm_env.py run benchmarks/vllm_hits.py [--pairs 40] [--cold 60] [--decode 8] [--verify sample always]
        [--loads sync async]

A tiny Llama in float32, a prefix of 4,096 tokens (67 MB of keys and values), one thread of computation in every
run, one core left for the daemon. A store always computes checksums, in the same pass as its copy; a load checks
one chunk in 64 (``verify_hot: sample``), none or, in the same pass, all: one engine for each rule that is named, hooks
and cold prompts with the first. One engine more has requests wait for their loads (``lmcache.async_load``). The 99th
percentile is held against a bar from 300 pairs on. Upstream's LMCache runs beside it where ``LMCACHE_BENCH_PEER`` names the
Python of an environment that has it and vLLM (see docs/howto/vllm.md).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "engines/vllm/tests/real"))

import engine  # noqa: E402 -- the harness of the tests
import models  # noqa: E402

PREFIX = 4096
NBYTES = PREFIX * 8 * 2 * 4 * 64 * 4
"""Tokens, layers, keys and values, heads, their size, bytes."""
RATES = {"off": 0.8, "sample": 0.8, "always": 0.65}
"""Least rate of a transfer, as a share of memcpy's, by what is verified."""
OVER_MS = {"sync": 2.0, "async": 6.0}
"""What a hit may take besides the copy, in the median; and in the 99th percentile on top of that:"""
TAIL_MS, TAIL_PAIRS = 10.0, 300
"""the latter only where there are so many pairs."""


def memcpy_ms(laps: int = 25) -> float:
    """Median of one thread copying as many bytes between touched memory."""
    source, target = np.ones(NBYTES, np.uint8), np.zeros(NBYTES, np.uint8)
    times = []
    for _ in range(laps):
        begun = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e3


def measure(python: str, log: Path, env: dict[str, str], **job: Any) -> dict[str, Any]:
    """Run ``vllm_engine.py`` in an environment; its result."""
    command = [python, str(ROOT / "benchmarks/vllm_engine.py"), json.dumps(job)]
    given = os.environ | engine.ENVIRONMENT | env
    with open(log, "wb") as out:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=out, env=given, cwd=log.parent, check=False
        )
        out.write(done.stdout)
    lines = [line for line in done.stdout.decode().splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"the engine failed:\n{engine.tail(log)}")
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def ms(values: Sequence[float], share: float = 0.5) -> float:
    """A quantile in milliseconds."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] * 1e3


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median, by rank."""
    ordered, count = sorted(values), len(values)
    reach = 0.98 * count**0.5
    return ordered[max(0, int(count / 2 - reach))], ordered[min(count - 1, int(count / 2 + reach))]


def transfers_ms(log: Path, tokens: int) -> list[float]:
    """What the engine's own log says each load of so many tokens took."""
    pattern = rf"Retrieved {tokens} out of .* cost ([0-9.]+) ms"
    return [float(found) for found in re.findall(pattern, log.read_text(errors="replace"))]


def report(name: str, found: dict[str, Any], log: Path, memcpy: float) -> float:
    """The pairs of one connector; the rate of its transfers as a share of memcpy's."""
    over = [ours - own for own, ours in zip(found["own"], found["ours"], strict=True)]
    own, ours = found["own"], found["ours"]
    print(
        f"{name}: {len(over)} pairs: own hit {ms(own):.1f} ms (p99 {ms(own, 0.99):.1f}), "
        f"hit {ms(ours):.1f} ms (p99 {ms(ours, 0.99):.1f}), paired difference median {ms(over):.1f} ms, "
        f"p99 {ms(over, 0.99):.1f} ms; cold {found['cold']:.2f} s"
    )
    took = statistics.median(transfers_ms(log, PREFIX) or [0.0])
    if took:
        print(f"{name}: transfer {took:.1f} ms by its log, {memcpy / took:.0%} of memcpy's rate")
    return memcpy / took if took else 0.0


def ours(
    folder: Path, options: argparse.Namespace, memcpy: float, model: str, verify: str, loads: str
) -> bool:
    """Our connector under one rule of verification; whether it stays below the bars."""
    name = f"lmcache, verify_hot {verify}, {loads}"
    first = (verify, loads) == (options.verify[0], options.loads[0])
    folder.mkdir()
    flags = ["--chunk-size", "256", *(options.flag or ())]
    with engine.daemon(folder, *flags, gib=1.0) as running:
        extra = running.connector["kv_connector_extra_config"] | {
            "lmcache.verify_hot": verify, "lmcache.async_load": loads == "async",
        }  # fmt: skip
        connector = running.connector | {
            "kv_connector": "TimedConnector", "kv_connector_module_path": "vllm_timed",
            "kv_connector_extra_config": extra,
        }  # fmt: skip
        env = running.env | {
            "PYTHONPATH": str(ROOT / "benchmarks"), "LMCACHE_BENCH_TIMES": str(folder),
        }  # fmt: skip
        found = measure(
            sys.executable, folder / "engine.log", env, model=model, connector=connector,
            pairs=options.pairs, cold=options.cold * first, decode=options.decode * first,
        )  # fmt: skip
    rate, least = report(name, found, folder / "engine.log", memcpy), RATES[verify]
    over = [hit - own for own, hit in zip(found["own"], found["ours"], strict=True)]
    by_chance = [after - before for before, after in itertools.pairwise(found["own"])]
    bar = memcpy / least + OVER_MS[loads]
    good = ms(over) <= bar and rate >= least
    tail = f"{TAIL_PAIRS} pairs would tell of the 99th percentile"
    if len(over) >= TAIL_PAIRS:
        good &= ms(over, 0.99) <= bar + TAIL_MS
        tail = f"{bar + TAIL_MS:.1f} ms in the 99th percentile"
    print(
        f"{name}: bars memcpy / {least} + {OVER_MS[loads]:.0f} ms = {bar:.1f} ms ({tail}) "
        f"and {least:.0%} of memcpy's rate: {'held' if good else 'MISSED'}"
    )
    print(
        f"{name}: of two own hits in turn the second took up to {ms(by_chance, 0.99):.1f} ms more (p99)"
    )
    if found["kept"]:
        change = [a / b - 1 for a, b in zip(found["kept"], found["skipped"], strict=True)]
        low, high = interval(change)
        print(
            f"lmcache: cold, kept against not kept: {len(change)} pairs, median {statistics.median(change):+.1%}, "
            f"95 % interval {low:+.1%} to {high:+.1%}, spread of one {statistics.stdev(change):.1%}"
        )
    for hook, seconds in found["hooks"].items():
        share = seconds / found["decode"]
        calls = found["hook_calls"][hook]
        good &= share <= 0.01
        print(f"lmcache: hooks of the {hook}: {share:.2%} of the steps ({calls} calls)")
    return bool(good)


@contextlib.contextmanager
def peer_server(python: str, folder: Path) -> Iterator[int]:
    """Upstream's server in its fastest mode."""
    port, http, metrics = engine.free_port(), engine.free_port(), engine.free_port()
    lmcache = str(Path(python).with_name("lmcache"))
    command = [
        lmcache, "server", "--host", "127.0.0.1", "--port", str(port), "--l1-size-gb", "3",
        "--no-l1-use-lazy", "--eviction-policy", "LRU", "--chunk-size", "256", "--http-port", str(http),
        "--prometheus-port", str(metrics), "--supported-transfer-mode", "auto",
        "--shm-name", f"bench{os.getpid()}",
    ]  # fmt: skip
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | PEER_ENV)
    try:
        time.sleep(1)
        engine.wait(lambda: _open(http), 60, lambda: engine.tail(folder / "server.log"))
        yield port
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


PEER_ENV = {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}


def _open(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def peer(python: str, folder: Path, pairs: int, memcpy: float, model: str) -> None:
    """Upstream's connector on the same pairs."""
    folder.mkdir()
    with peer_server(python, folder) as port:
        connector = {
            "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port,
            },
        }  # fmt: skip
        found = measure(
            python, folder / "engine.log", PEER_ENV, model=model, connector=connector, pairs=pairs
        )
    report("upstream", found, folder / "engine.log", memcpy)


def main() -> int:
    """Measure; 0 when the bars hold."""
    options = argparse.ArgumentParser()
    options.add_argument("--pairs", type=int, default=40)
    options.add_argument("--cold", type=int, default=60)
    options.add_argument("--decode", type=int, default=8)
    options.add_argument("--flag", action="append", help="one more flag of the daemon")
    options.add_argument("--verify", nargs="+", choices=RATES, default=["sample", "always"])
    options.add_argument("--loads", nargs="+", choices=OVER_MS, default=["sync", "async"])
    given = options.parse_args()
    model = str(models.make(ROOT / ".lmcache-work/vllm-models", "llama-bench"))
    memcpy = memcpy_ms()
    print(f"memcpy of {NBYTES / 1e6:.0f} MB: {memcpy:.1f} ms")
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-vllm-") as folder:
        runs = [(rule, given.loads[0]) for rule in given.verify]
        runs += [(given.verify[0], loads) for loads in given.loads[1:]]
        held = [ours(Path(folder) / "-".join(run), given, memcpy, model, *run) for run in runs]
        if python := os.environ.get("LMCACHE_BENCH_PEER"):
            peer(python, Path(folder) / "peer", given.pairs, memcpy, model)
    return int(not all(held))


if __name__ == "__main__":
    raise SystemExit(main())
