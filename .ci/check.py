"""`make check`: everything that can be said about the tree without running it. All stages run."""

from __future__ import annotations

import os
from pathlib import Path

from catalogue import read
from stage import run_stage

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv/bin"


def sources() -> list[str]:
    """Folders whose code is type-checked: the core, the redirects, each plugin's package, the scripts."""
    found = ["lmcache_core", "lmcache"]
    for path in read().paths:
        found += sorted(
            marker.parent.relative_to(ROOT).as_posix()
            for marker in (ROOT / path).rglob("py.typed")
            if "build" not in marker.parts
        )
    return found


def main() -> int:
    """Run every stage; print one table."""
    py = str(BIN / "python")
    packages = sources()
    # import-linter and mypy find packages in the source folders, whether installed or not
    folders = dict.fromkeys(str((ROOT / package).parent) for package in packages)
    os.environ["PYTHONPATH"] = os.environ["MYPYPATH"] = os.pathsep.join(folders)
    stages = [
        ("ruff", 10, [str(BIN / "ruff"), "check", "."]),
        ("format", 10, [str(BIN / "ruff"), "format", "--check", "."]),
        (
            "types",
            180,  # cold: torch and transformers are read whole
            [py, "-m", "mypy", *packages],
        ),
        ("types of the scripts", 30, [py, "-m", "mypy", *scripts()]),
        ("layering", 20, [str(BIN / "lint-imports"), "--no-logo"]),
        ("catalogue", 10, [py, ".ci/catalogue.py", "--check"]),
        ("docs", 40, [py, ".ci/docs.py", "--check"]),
    ]
    table = [(name, budget, *run_stage(name, budget, command)) for name, budget, command in stages]
    print(f"\n{'stage':<22}{'seconds':>8}{'budget':>8}  result")
    for name, budget, status, seconds in table:
        print(f"{name:<22}{seconds:>8.1f}{budget:>8}  {'ok' if status == 0 else 'FAILED'}")
    return int(any(status for _, _, status, _ in table))


def scripts() -> list[str]:
    """The scripts beside this one."""
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / ".ci").glob("*.py"))


if __name__ == "__main__":
    os.chdir(ROOT)
    raise SystemExit(main())
