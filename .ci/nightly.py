"""Long parts, each alone: `make nightly-<part>`, `make bench`, `make bench-storage`, `make bench-daemon`, `make sim`.

A part is a list of commands; each prints its table. A nightly part also writes benchmarks/results/<part>.json: date,
machine, versions, and what every command printed. A part whose files are not in this tree says so and fails: a name
that runs nothing must not look green.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
HISTORIES = ["lmcache_core.testing.histories"]
WHOLE = ["tests.simulation"]
STORAGE = [
    ["benchmarks/storage_copy.py"],
    ["benchmarks/storage_index.py"],
    ["benchmarks/storage_tier.py"],
    ["benchmarks/traces.py"],
    ["benchmarks/traces_manager.py"],
]
MODES = ("int8", "k8v4h", "kivi4", "int4h", "turbo4", "turbo3")
QUANT = [f"--serde=quant: {{mode: {mode}}}" for mode in MODES]
PARTS: dict[str, tuple[float, list[list[str]]]] = {
    # part: (budget in seconds, commands; the first word is a file or a module)
    "bench": (1500, [*STORAGE, ["benchmarks/disk.py"]]),
    "bench-storage": (900, STORAGE),
    "bench-daemon": (300, [["benchmarks/daemon.py"]]),
    "bench-tiers": (900, [["benchmarks/tiers.py"]]),
    "bench-disk": (900, [["benchmarks/disk.py"]]),
    "sim": (900, [[*WHOLE, "--seeds", "200"]]),
    "storage": (
        1500,
        [
            *STORAGE,
            ["benchmarks/disk.py", "--long"],
            ["backends/disk/tests/killing.py", "--kills", "1000"],
            [*HISTORIES, "--seeds", "5000"],
        ],
    ),
    "daemon": (
        1500,
        [
            ["benchmarks/daemon.py"],
            ["tests/wire/soak.py", "--seconds", "600", "--operations", "1000000"],
            ["tests/wire/soak.py", "--kills", "200"],
            ["tests/wire/stopped.py", "--seconds", "30"],
        ],
    ),
    "chaos": (900, [["tests/chaos/run.py", "--seconds", "600"]]),
    "vllm": (
        1500,
        [
            [".ci/vllm_env.py", "test", "--long"],
            [".ci/vllm_env.py", "test", "--release", "0.30.0"],
            [".ci/vllm_env.py", "run", "benchmarks/vllm_hits.py"],
        ],
    ),
    "tiers": (
        1500,
        [
            [".ci/infinistore_server.py", "--test"],  # makes the server of a part of the next one
            ["benchmarks/tiers.py"],
            ["pytest", "-q", "backends/mooncake/tests/faults.py"],
        ],
    ),
    "serdes": (
        1500,
        [
            ["benchmarks/serdes.py"],  # makes the model of the next one
            ["lmcache_core", "bench", "serde", ".lmcache-work/demo/smollm2-135m-instruct", *QUANT],
            ["benchmarks/streaming.py"],
            ["tests/storage/damaged.py", "--cases", "1000000"],
        ],
    ),
    "faults": (
        1500,
        [
            [*WHOLE, "--seeds", "20000"],
            [*WHOLE, "--planted", "--seeds", "2000"],
            [".ci/stage.py", "thread sanitizer", "300", "--", "bash", ".ci/native.sh", "thread"],
        ],
    ),
    "transformers": (1500, [[".ci/transformers_ends.py"]]),
    "install": (1500, [[".ci/extras.py", "--all"], [".ci/wheels.py"]]),
}


def present(command: Sequence[str]) -> bool:
    """Whether the file or module of a command is in this tree."""
    if command[0].endswith(".py"):
        return (ROOT / command[0]).exists()
    try:
        return find_spec(command[0]) is not None
    except ModuleNotFoundError:  # not even its package
        return False


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpu = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": cpu[0] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages * size / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def run(command: Sequence[str]) -> dict[str, Any]:
    """Run one command, echo what it prints, and keep it."""
    words = [sys.executable, *(() if command[0].endswith(".py") else ("-m",)), *command]
    started = time.monotonic()
    lines: list[str] = []
    with subprocess.Popen(
        words, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    seconds = time.monotonic() - started
    print(f"== {' '.join(command)}: {seconds:.0f} s, exit {process.returncode}", flush=True)
    return {
        "command": " ".join(command),
        "exit": process.returncode if lines or process.returncode else "it printed nothing",
        "seconds": round(seconds, 1),
        "printed": lines,
    }


def main(arguments: list[str]) -> int:
    """Run one part; 0 good, 1 failed, 2 unknown or not here."""
    part, *extra = [word for word in arguments if word] or [""]
    if part not in PARTS:
        print(f"no part {part!r}; known: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    budget, commands = PARTS[part]
    if part == "sim" and extra:
        commands = [[*WHOLE, "--first", extra[0], "--seeds", "1"]]
    missing = [command[0] for command in commands if not present(command)]
    if missing:
        print(f"{part}: not in this tree: {', '.join(missing)}", file=sys.stderr)
        return 2
    started = time.monotonic()
    results = [run(command) for command in commands]
    seconds = time.monotonic() - started
    if not part.startswith(("bench", "sim")):
        RESULTS.mkdir(parents=True, exist_ok=True)
        record = {
            "part": part,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": dict(sorted((dist.name, dist.version) for dist in distributions())),
            "seconds": round(seconds, 1),
            "commands": results,
        }
        (RESULTS / f"{part}.json").write_text(json.dumps(record, indent=1) + "\n")
    bad = [result["command"] for result in results if result["exit"] != 0]
    for command in bad:
        print(f"{part}: failed: {command}", file=sys.stderr)
    over = seconds > 2 * budget
    print(
        f"{part}: {len(commands)} commands, {seconds:.0f} s of {budget:.0f} s{', over twice' * over}"
    )
    return int(bool(bad) or over)


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main(sys.argv[1:]))
