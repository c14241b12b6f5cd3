"""Long parts, each alone: `make nightly-<part>`, `make bench`, `make bench-storage`, `make sim`.

A part is a file of benchmarks/ or a module; it prints one table and writes benchmarks/results/<part>.json.
One whose file is not in this tree says so and fails: a name that runs nothing must not look green.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from stage import run_stage

ROOT = Path(__file__).resolve().parent.parent
PARTS: dict[str, tuple[float, list[list[str]]]] = {
    # part: (budget in seconds, commands, each a file and its arguments)
    "bench": (900, [["benchmarks/core.py"], ["benchmarks/storage.py"], ["benchmarks/disk.py"]]),
    "bench-storage": (600, [["benchmarks/storage.py"]]),
    "sim": (600, [["benchmarks/simulate.py"]]),
    "storage": (1500, [["benchmarks/storage.py", "--long"]]),
    "daemon": (1500, [["benchmarks/daemon.py"]]),
    "vllm": (1500, [["benchmarks/vllm.py"]]),
    "tiers": (1500, [["benchmarks/tiers.py"]]),
    "serdes": (1500, [["benchmarks/serdes.py"]]),
    "faults": (1500, [["benchmarks/faults.py"]]),
    "install": (1500, [[".ci/extras.py", "--all"]]),
}


def main(arguments: list[str]) -> int:
    """Run one part; 0 good, 1 failed, 2 unknown or not here."""
    part = arguments[0] if arguments else ""
    if part not in PARTS:
        print(f"no part {part!r}; known: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    budget, commands = PARTS[part]
    present = [command for command in commands if (ROOT / command[0]).exists()]
    if not present:
        print(f"{part}: not in this tree yet ({commands[0][0]} is missing)", file=sys.stderr)
        return 2
    status = 0
    for command in present:
        # an empty SEED= is none
        extra = [word for word in arguments[1:] if word]
        status |= run_stage(command[0], budget, [sys.executable, *command, *extra])[0]
    return int(bool(status))


if __name__ == "__main__":
    os.chdir(ROOT)
    raise SystemExit(main(sys.argv[1:]))
