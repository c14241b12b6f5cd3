"""Run one stage: time it, hold it to its budget, and refuse a stage that ran nothing.

    python .ci/stage.py NAME BUDGET_SECONDS -- COMMAND...

A stage fails when its command fails, when it takes twice its budget, or when it succeeds without having
printed a line (every tool here says what it looked at; pytest ends with 5 when it ran no test).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time


def run_stage(name: str, budget_s: float, command: list[str]) -> tuple[int, float]:
    """Run ``command``, echoing what it prints; (exit status, seconds)."""
    started = time.monotonic()
    lines = 0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        for chunk in process.stdout:
            lines += 1
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
    seconds = time.monotonic() - started
    status = process.returncode
    verdict = "ok" if status == 0 else f"failed ({status})"
    if status == 0 and lines == 0:
        status, verdict = 1, "failed: it ran nothing"
    elif status == 0 and seconds > 2 * budget_s and not os.environ.get("LMCACHE_NO_BUDGETS"):
        status, verdict = 1, "failed: over twice its budget"
    print(f"== {name}: {seconds:.1f} s of {budget_s:.0f} s, {verdict}", flush=True)
    return status, seconds


def main(arguments: list[str]) -> int:
    """Parse the command line and run the stage."""
    if len(arguments) < 4 or arguments[2] != "--":
        print(__doc__, file=sys.stderr)
        return 2
    return run_stage(arguments[0], float(arguments[1]), arguments[3:])[0]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
