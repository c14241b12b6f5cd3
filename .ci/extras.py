"""Resolve every extra with pip in a clean environment; print closure and bytes; install the small ones.

    .venv/bin/python .ci/extras.py          all of them
    .venv/bin/python .ci/extras.py --all    and install those that require torch beside its CPU build

Bytes are those of the installed files in `.venv`, which holds everything. A closure under 60 MB is installed for
real, a larger one resolved only. What requires torch is resolved in `.venv`, where its CPU build is: nothing of
torch may be fetched again.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from setup import NATIVE, PIP, ROOT, WORK, native_lack

AT_ONCE = 2
"""Extras tried at the same time, each in an environment of its own."""
SMALL = 60 * 10**6
HEAVY = re.compile(r"torch|triton|nvidia|cuda")


def extras() -> list[str]:
    """Names of the extras a user may ask for."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [name for name in data["project"]["optional-dependencies"] if name != "dev"]


def others() -> set[str]:
    """Extras in place of which `.venv` has a rival: wheels that exclude each other."""
    data = tomllib.loads((ROOT / "plugins.toml").read_text())
    rows = [row for kind in data.values() if isinstance(kind, dict) for row in kind.values()]
    return {name for row in rows for name in list(row.get("variants", {}))[1:]}


def closure(requirement: str) -> dict[str, int | None]:
    """Everything a requirement brings, as `.venv` has it: name -> bytes installed, None when it is not there."""
    found: dict[str, int | None] = {}
    waiting = [Requirement(requirement)]
    seen: set[tuple[str, str]] = set()
    while waiting:
        wanted = waiting.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        try:
            dist = distribution(name)
        except PackageNotFoundError:
            found[name] = None
            continue
        found[name] = sum(file.size or 0 for file in dist.files or [])
        for extra in ("", *wanted.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            needs = [Requirement(line) for line in dist.requires or []]
            waiting += [n for n in needs if n.marker is None or n.marker.evaluate({"extra": extra})]
    return found


def install(python: str | Path, name: str, *options: str) -> list[str]:
    """Let pip install one extra into an environment; the names it chose."""
    report = WORK / f"extra-{name}.json"
    environment = dict(os.environ, PWD=str(ROOT), PIP_DISABLE_PIP_VERSION_CHECK="1")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-qq", *options]
    command += ["--report", str(report), "-c", "constraints.txt", "-e", f".[{name}]"]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False
    )
    if result.returncode:
        sys.stdout.write(result.stdout + result.stderr)
        raise SystemExit(f"extras: failed: {' '.join(command)}")
    return [item["metadata"]["name"] for item in json.loads(report.read_text())["install"]]


def fresh(folder: str) -> Path:
    """A clean environment; pip works on it from outside."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return Path(folder) / "bin/python"


def one(name: str, everything: bool) -> tuple[int, float, str]:
    """Number of distributions, MB, and what was done, for one extra."""
    sizes = closure(f"lmcache[{name}]")
    unknown = [item for item, size in sizes.items() if size is None]
    if unknown and name not in others():
        raise SystemExit(
            f"extras: [{name}] needs {', '.join(unknown)}, which `make setup` left out"
        )
    total = sum(size or 0 for size in sizes.values())
    if any(HEAVY.match(item) for item in sizes):
        again = [item for item in install(sys.executable, name, "--dry-run") if HEAVY.match(item)]
        if again:
            raise SystemExit(f"extras: [{name}] would fetch {', '.join(again)} again")
        if everything:
            install(sys.executable, name)
        result = f"{'installed' if everything else 'resolved'} beside torch's CPU build"
        return len(sizes), total / 1e6, result
    small = total < SMALL and not unknown
    with tempfile.TemporaryDirectory(dir=WORK, prefix="extra-") as folder:
        python = fresh(folder)
        chosen = install(python, name, *(() if small else ("--dry-run",)))
        if small:
            check = [sys.executable, "-m", "pip", "--python", str(python), "check"]
            subprocess.run(check, check=True, stdout=subprocess.DEVNULL)
    return len(chosen), total / 1e6, "installed" if small else "resolved"


def main(arguments: list[str]) -> int:
    """Print one table."""
    lack = native_lack()
    needs_compiler = {NATIVE.replace("csrc", "native"), "all"} if lack else set()
    names, rivals = extras(), others()
    print(f"{'extra':<18}{'closure':>8}{'MB':>9}{'s':>6}  result")

    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    first: dict[tuple[str, ...], str] = {}
    for name in names:  # several names of one distribution are one closure
        first.setdefault(tuple(wanted[name]), name)

    def row(name: str) -> str:
        if (same := first[tuple(wanted[name])]) != name:
            return f"{name:<18}{'':>8}{'':>9}{'':>6}  as {same}"
        if name in needs_compiler:
            return f"{name:<18}{'':>8}{'':>9}{'':>6}  skipped: {lack}"
        if name in rivals and "--all" not in arguments:
            return f"{name:<18}{'':>8}{'':>9}{'':>6}  left to --all: its wheel excludes another"
        started = time.monotonic()
        count, megabytes, result = one(name, "--all" in arguments)
        seconds = time.monotonic() - started
        return f"{name:<18}{count:>8}{megabytes:>9.1f}{seconds:>6.0f}  {result}"

    with ThreadPoolExecutor(1 if "--all" in arguments else AT_ONCE) as executor:
        for line in executor.map(row, names):
            print(line, flush=True)
    print(f"extras: {len(names)} with {PIP}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
