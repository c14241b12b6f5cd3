"""Run the tests of the transformers engine with the oldest supported release, and those of the real model.

    .venv/bin/python .ci/transformers_ends.py

The old release is put beside the environment, in .lmcache-work, without its dependencies: they are there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from setup import ROOT, WORK

OLDEST = "5.20.0"
TESTS = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "engines/transformers/tests"]
PREPARE = "from lmcache_engine_transformers.demo.model import home, prepare; print(prepare(home(), print))"


def main() -> int:
    """Make the model if it is not there, then test twice; 0 good."""
    beside = WORK / f"transformers-{OLDEST}"
    install = ["-m", "pip", "install", "-qq", "--no-deps", "--target", str(beside)]
    if not beside.exists():
        subprocess.run([sys.executable, *install, f"transformers=={OLDEST}"], check=True)
    subprocess.run([sys.executable, "-c", PREPARE], check=True)
    status = 0
    for path in (os.environ.get("PYTHONPATH", ""), str(beside)):
        environment = os.environ | {"PYTHONPATH": path}
        probe = "import transformers; print('transformers', transformers.__version__)"
        for command in (["-c", probe], TESTS):
            status |= subprocess.run(
                [sys.executable, *command], cwd=ROOT, env=environment, check=False
            ).returncode
    return int(bool(status))


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent.parent)
    raise SystemExit(main())
