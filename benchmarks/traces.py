"""Hit rates and speed of eviction policies on recorded prefix traffic.

``python benchmarks/traces.py [--json FILE] [--policies lru,arc] [--percent 5,10]`` prints one table.
Each cell is the share of blocks hit in an unbroken run from the front; capacity is a percentage of
the distinct blocks. Rows with a known value show the difference in percentage points and fail the
run when it is too large.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from lmcache_core.spi.policy import EvictionPolicy
from lmcache_core.testing.replay import distinct, oracle_hints, read_trace, replay

TRACES = Path(__file__).parents[1] / "tests" / "data" / "traces"
POLICIES = {
    "lru": "lru:LRU",
    "fifo": "fifo:FIFO",
    "arc": "arc:ARC",
    "s3fifo": "s3fifo:S3FIFO",
    "lfu": "lfu:LFU",
    "mru": "mru:MRU",
    "wtinylfu": "wtinylfu:WTinyLFU",
    "gdsf": "gdsf:GDSF",
}
HINTS = {"lru+hint 90 %": 0.9, "lru+hint 50 %": 0.5}


def make(name: str, capacity: int) -> EvictionPolicy:
    """A policy of this house with its default configuration."""
    module, _, attribute = POLICIES[name].partition(":")
    kind = getattr(import_module(f"lmcache_core.policies.{module}"), attribute)
    policy: EvictionPolicy = kind(kind.config_type(), capacity)
    return policy


def run(names: list[str], percents: list[int]) -> list[dict[str, Any]]:
    """Replay both traces; one row per trace, policy and capacity."""
    reference = json.loads((TRACES / "reference.json").read_text())
    rows = []
    for title in ("conversation", "synthetic"):
        requests = read_trace(TRACES / f"mooncake_{title}_trace.jsonl.gz")
        blocks = distinct(requests)
        hints = {label: oracle_hints(requests, right=right) for label, right in HINTS.items()}
        for name in [*names, *(HINTS if "lru" in names else ())]:
            for percent in percents:
                capacity = blocks * percent // 100
                policy = make(name.partition("+")[0], capacity)
                start = time.perf_counter()
                done = replay(policy, requests, capacity, hints=hints.get(name))
                seconds = time.perf_counter() - start
                row: dict[str, Any] = {
                    "trace": title, "policy": name, "percent": percent,
                    "hit_rate": round(done.rate, 5), "calls_per_s": round(done.calls / seconds),
                    "blocks_per_s": round(done.asked / seconds),
                }  # fmt: skip
                if name in reference[title] and percent in reference["percent"]:
                    expected = reference[title][name][reference["percent"].index(percent)]
                    row["off_pp"] = round(100 * (done.rate - expected), 2)
                    row["good"] = abs(row["off_pp"]) <= reference["tolerance_pp"][name]
                rows.append(row)
    return rows


def table(rows: list[dict[str, Any]], percents: list[int]) -> str:
    """Rows as text: hit rates per capacity, the difference to the reference, the slowest replay."""
    head = "".join(f"{percent:>8} %" for percent in percents)
    lines = [f"{'trace':<14}{'policy':<16}{head}{'off pp':>9}{'k calls/s':>11}"]
    names = list(dict.fromkeys((row["trace"], row["policy"]) for row in rows))
    for title, name in names:
        mine = [row for row in rows if (row["trace"], row["policy"]) == (title, name)]
        rates = "".join(f"{100 * row['hit_rate']:>9.2f} " for row in mine)
        off = max((row["off_pp"] for row in mine if "off_pp" in row), key=abs, default=None)
        speed = min(row["calls_per_s"] for row in mine) / 1000
        lines.append(
            f"{title:<14}{name:<16}{rates}{'' if off is None else f'{off:+.2f}':>9}{speed:>11.0f}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--percent", default="1,2,5,10,20")
    options = parser.parse_args()
    percents = [int(each) for each in options.percent.split(",")]
    rows = run(options.policies.split(","), percents)
    print(table(rows, percents))
    if options.json:
        result = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": f"{platform.machine()} {platform.system()}",
            "python": platform.python_version(),
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    wrong = [row for row in rows if not row.get("good", True)]
    for row in wrong:
        print(f"off by {row['off_pp']} pp: {row}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
