"""The calibrated codecs against their bars: tables from one source of text, figures on three texts of another.

    python benchmarks/calibrated.py [--model FOLDER] [--tables FILE] [--texts N]

Everything comes from ``lmcache calibrate`` (unless tables are given) and ``lmcache bench serde``, a copy in the same
run. Figures within ``SLACK`` of a bar are accepted. Exit status 1: a bar was missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LEVELS = range(1, 6)
BARS = {2: (4.5, 0.0025), 4: (6.2, 0.011)}
"""Of klt: level to least ratio and largest divergence."""
SPEED = 0.3
"""GB/s of bfloat16 that klt has to decode on one core."""
SLACK = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: that of the demo, fetched once")
    parser.add_argument("--tables", type=Path)
    parser.add_argument("--texts", type=int, default=3)
    chosen = parser.parse_args()
    folder = chosen.model or model()
    tables = chosen.tables or ROOT / ".lmcache-work" / f"{Path(folder).name}.tables"
    if not tables.exists():
        subprocess.run([*LMCACHE, "calibrate", folder, "--out", str(tables)], check=True)
    chains = {
        f"{codec} {level}": f"[{codec}: {{tables: '{tables}', level: {level}}}]"
        for codec in ("klt", "cachegen")
        for level in LEVELS
    }
    command = [*LMCACHE, "bench", "serde", folder, "--json", "--texts", str(chosen.texts)]
    command += [f"--serde={written}" for written in chains.values()]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows = dict(zip(chains, json.loads(done.stdout)["rows"], strict=True))
    for name, row in rows.items():
        print(
            f"{name}: {row['bits']:.2f} bits, ratio {row['ratio']:.3f}, KL {row['kl']:.5f}, top-1 "
            f"{100 * row['top1']:.1f} %, dNLL {row['nll']:+.4f}, encode {row['encode_gb_s']:.2f}, decode "
            f"{row['decode_gb_s']:.2f} GB/s (copy {row['copy_gb_s']:.1f})"
        )
    found = missed(rows)
    for each in found:
        print(f"missed: {each}")
    return int(bool(found))


LMCACHE = (sys.executable, "-m", "lmcache_core")


def model() -> str:
    from lmcache_engine_transformers.demo.model import home, prepare

    return str(prepare(home(), print))


def missed(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Bars of klt, and ladders that are none."""
    found = []
    for level, (ratio, kl) in BARS.items():
        row = rows[f"klt {level}"]
        if row["ratio"] < ratio * (1 - SLACK) or row["kl"] > kl * (1 + SLACK):
            found.append(f"klt {level}: {row['ratio']:.3f}x of {ratio} at {row['kl']:.5f} of {kl}")
    slowest = min(rows[f"klt {level}"]["decode_gb_s"] for level in LEVELS)
    if slowest < SPEED * (1 - SLACK):
        found.append(f"klt: decode {slowest:.2f} of {SPEED} GB/s")
    for codec in ("klt", "cachegen"):
        for finer, coarser in pairwise(rows[f"{codec} {level}"] for level in LEVELS):
            if not (coarser["ratio"] > finer["ratio"] and coarser["kl"] > finer["kl"]):
                found.append(
                    f"{codec}: no ladder at {coarser['ratio']:.3f}x, KL {coarser['kl']:.5f}"
                )
    return found


if __name__ == "__main__":
    sys.exit(main())
