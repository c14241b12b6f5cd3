"""Write the versions in constraints.txt: what pip resolves today for this whole tree on this machine.

    .venv/bin/python .ci/constraints.py          resolve and write
    .venv/bin/python .ci/constraints.py --check  every third-party distribution that `.venv` needed is pinned

The hashes are those of the wheels for Linux x86-64 and CPython 3.11; `make setup` compares them on such a
machine. They stand in comments, because pip refuses every editable install once one constraint has a hash.
torch has no hash: the same version comes from more than one place.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import distributions
from pathlib import Path

from setup import BUILD_TOOLS, CONSTRAINTS, PIP, TORCH, must, pip
from setup import distributions as folders

ROOT = Path(__file__).resolve().parent.parent
MARK = "# versions, written by .ci/constraints.py\n"


def normal(name: str) -> str:
    """The form in which names are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def resolve() -> dict[str, tuple[str, str]]:
    """name -> (version, sha256 or empty) of every third-party distribution this tree needs."""
    report = ROOT / ".lmcache-work/resolved.json"
    report.parent.mkdir(exist_ok=True)
    kept = [line for line in CONSTRAINTS.read_text().partition(MARK)[0].splitlines() if "@" in line]
    only_siblings = ROOT / ".lmcache-work/siblings.txt"
    only_siblings.write_text("\n".join(kept) + "\n")
    editables = [word for folder in folders() for word in ("-e", f"./{folder}")]
    result = pip(
        "install", "-q", "--dry-run", "--ignore-installed", "--no-build-isolation",
        "--report", str(report), "-c", str(only_siblings),
        PIP, f"torch=={TORCH}", *BUILD_TOOLS, "-e", ".[dev]", *editables, quiet=True,
    )  # fmt: skip
    must(result, "resolving")
    found = {}
    for item in json.loads(report.read_text())["install"]:
        info = item["download_info"]
        if "dir_info" in info:
            continue  # first-party
        version = item["metadata"]["version"].split("+")[0]
        name = normal(item["metadata"]["name"])
        digest = "" if name == "torch" else info["archive_info"]["hashes"]["sha256"]
        found[name] = (version, digest)
    return found


def unpinned() -> list[str]:
    """Installed third-party distributions that constraints.txt does not name."""
    pinned = {
        normal(line.split("==")[0]) for line in CONSTRAINTS.read_text().splitlines() if "==" in line
    }
    names = {normal(dist.metadata["Name"]) for dist in distributions()}
    return sorted(name for name in names - pinned if not name.startswith("lmcache"))


def main(arguments: list[str]) -> int:
    """Write or check; 0 good, 1 findings."""
    if arguments == ["--check"]:
        lines = unpinned()
        for name in lines:
            print(
                f"constraints: {name} is installed and not pinned; run .ci/constraints.py",
                file=sys.stderr,
            )
        print(f"constraints: {len(lines)} unpinned")
        return int(bool(lines))
    found = resolve()
    head = CONSTRAINTS.read_text().partition(MARK)[0]
    lines = [
        f"{name}=={version}" + (f"  # sha256:{digest}" if digest else "")
        for name, (version, digest) in sorted(found.items())
    ]
    CONSTRAINTS.write_text(head + MARK + "\n".join(lines) + "\n")
    print(f"constraints: {len(lines)} versions")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
