"""Resolve every extra with plain pip in a clean environment; print closure and bytes; install the small ones.

    .venv/bin/python .ci/extras.py          resolve all, install those under 60 MB
    .venv/bin/python .ci/extras.py --all    the same, and the ones that require torch beside its CPU build

Bytes are those of the installed files of the same version in `.venv`. What requires torch is resolved in
`.venv`, which holds the CPU build: nothing of torch may be fetched again.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from setup import NATIVE, PIP, ROOT, WORK, native_lack

CLEAN = WORK / "extras-venv"
SMALL = 60 * 10**6
HEAVY = re.compile(r"torch|triton|nvidia|cuda")


def extras() -> list[str]:
    """Names of the extras a user may ask for."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [name for name in data["project"]["optional-dependencies"] if name != "dev"]


def pip(python: Path | str, *arguments: str) -> None:
    """Run pip in the root of the tree; stop with its words when it fails."""
    environment = dict(os.environ, PWD=str(ROOT), PIP_DISABLE_PIP_VERSION_CHECK="1")
    command = [str(python), "-m", "pip", *arguments]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False
    )
    if result.returncode:
        sys.stdout.write(result.stdout + result.stderr)
        raise SystemExit(f"extras: failed: {' '.join(command)}")


def resolve(python: Path | str, name: str) -> list[tuple[str, str, bool]]:
    """(name, version, ours) of everything pip would install for one extra."""
    report = WORK / "extra.json"
    wanted = ("-c", "constraints.txt", "-e", f".[{name}]")
    pip(python, "install", "-qq", "--dry-run", "--report", str(report), *wanted)
    return [
        (item["metadata"]["name"], item["metadata"]["version"], "dir_info" in item["download_info"])
        for item in json.loads(report.read_text())["install"]
    ]


def nbytes(name: str, version: str) -> int | None:
    """Bytes of the installed files of a distribution of `.venv`, None when it is not there."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None
    if found.version.split("+")[0] != version.split("+")[0]:
        return None
    return sum(file.size or 0 for file in found.files or [])


def fresh() -> Path:
    """A clean environment with the pinned pip."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(CLEAN)], check=True)
    pip(CLEAN / "bin/python", "install", "-qq", PIP)
    return CLEAN / "bin/python"


def main(arguments: list[str]) -> int:
    """Resolve, print one table, install."""
    rows = []
    lack = native_lack()
    natives = {NATIVE.replace("csrc", "native"), "all"} if lack else set()
    python = fresh()
    for name in extras():
        if name in natives:
            rows.append((name, "", "", f"skipped: {lack}"))
            continue
        started = time.monotonic()
        closure = resolve(python, name)
        sizes = {item: nbytes(item, version) for item, version, ours in closure if not ours}
        unknown = [item for item, size in sizes.items() if size is None]
        total = sum(size or 0 for size in sizes.values())
        if any(HEAVY.match(item) for item in sizes):
            again = [item for item, _, _ in resolve(sys.executable, name) if HEAVY.match(item)]
            if again:
                raise SystemExit(
                    f"extras: [{name}] would fetch {', '.join(again)} beside the CPU build"
                )
            result = "beside torch's CPU build: nothing fetched again"
            if "--all" in arguments:
                pip(sys.executable, "install", "-qq", "-c", "constraints.txt", "-e", f".[{name}]")
                result = "installed beside torch's CPU build"
        elif unknown:
            result = f"size unknown: {', '.join(unknown)}"
        elif total < SMALL:
            pip(fresh(), "install", "-qq", "-c", "constraints.txt", "-e", f".[{name}]")
            pip(CLEAN / "bin/python", "check")
            result = "installed"
            python = fresh()
        else:
            result = "resolved"
        seconds = time.monotonic() - started
        rows.append((name, str(len(closure)), f"{total / 1e6:.1f}", f"{result} ({seconds:.0f} s)"))
    print(f"{'extra':<18}{'closure':>8}{'MB':>9}  result")
    for row in rows:
        print(f"{row[0]:<18}{row[1]:>8}{row[2]:>9}  {row[3]}")
    print(f"extras: {len(rows)} resolved with {PIP}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
