"""Make the environment `.venv`; run by `make setup` with any Python >= 3.11, standard library only.

Order: every prerequisite is checked, and one line printed for each that is missing, before anything is
downloaded; then pip (pinned), the CPU build of torch, the build tools, and every distribution of this
tree, editable. Running it again when nothing changed takes no time.

Environment: TORCH=default installs torch from whatever pip is configured with, several GB of accelerator
libraries included.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036 -- any python3 may be asked to run this script
    sys.exit(
        f"setup: Python >= 3.11 needed, {sys.executable} is older: install python3.11, "
        "then PYTHON=python3.11 make setup"
    )

import tomllib

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PY = VENV / "bin/python"
WORK = ROOT / ".lmcache-work"
STAMP = WORK / "setup.stamp"
CONSTRAINTS = ROOT / "constraints.txt"
PIP = "pip==26.3"
TORCH = "2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
BUILD_TOOLS = ["hatchling", "editables", "scikit-build-core", "nanobind", "cmake", "ninja"]
DISK_NEEDED = 4 * 10**9
NATIVE = "csrc"


def missing() -> list[str]:
    """One line for every prerequisite that is not there, each with its remedy."""
    lines = []
    for module in ("venv", "ensurepip"):
        try:
            __import__(module)
        except ImportError:
            name = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
            lines.append(f"Python module {module} is missing: install {name} (Debian, Ubuntu)")
            break
    if not PY.exists() and shutil.disk_usage(ROOT).free < DISK_NEEDED:
        lines.append(f"4 GB of disk needed at {ROOT}: free some, or move the tree")
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        lines.append(
            "Linux on x86-64 or aarch64 needed for the whole tree; elsewhere: pip install -e . (core, memory tier, CLI)"
        )
    if any(character.isspace() for character in str(ROOT)):
        lines.append(
            f"the path {str(ROOT)!r} has white space in it, which pip cannot take: move the tree"
        )
    return lines


def native_lack() -> str:
    """Why the native part cannot be built here; empty when it can."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), "")
    if not compiler or not shutil.which(compiler):
        return "no C++ compiler: install g++"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return f"no Python.h: install python{version}-dev"
    return ""


def distributions() -> list[str]:
    """Folders of the plugin distributions, from plugins.toml, in its order."""
    data = tomllib.loads((ROOT / "plugins.toml").read_text())
    rows = [row for kind in data.values() if isinstance(kind, dict) for row in kind.values()]
    return list(dict.fromkeys(row["path"] for row in rows if "path" in row))


def fingerprint(native: bool) -> str:
    """Digest of everything that decides what is installed."""
    digest = hashlib.sha256(f"{sys.version} {PIP} {TORCH} {native} {ROOT}".encode())
    digest.update(CONSTRAINTS.read_bytes())
    for folder in (".", *distributions()):
        data = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
        tools = data.get("tool", {})
        built = [
            data["project"],
            data["build-system"],
            tools.get("hatch"),
            tools.get("scikit-build"),
        ]
        digest.update(json.dumps(built, sort_keys=True).encode())
    if native and (ROOT / NATIVE).is_dir():
        sources = [*(ROOT / NATIVE).rglob("*.[ch]pp"), ROOT / NATIVE / "CMakeLists.txt"]
        for source in sorted(sources):
            digest.update(source.read_bytes())
    return digest.hexdigest()


def pip(*arguments: str, quiet: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the environment's pip from the root of the tree; siblings in constraints are relative to it."""
    environment = dict(
        os.environ, PWD=str(ROOT), PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1"
    )
    return subprocess.run(
        [str(PY), "-m", "pip", *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
        check=False,
    )


def must(result: subprocess.CompletedProcess[str], what: str) -> None:
    """Stop with one line when a step failed."""
    if result.returncode:
        sys.stdout.write(result.stdout or "")
        raise SystemExit(f"setup: {what} failed")


def torch_installed() -> bool:
    """Whether the pinned torch is there."""
    probe = "import importlib.metadata as m; print(m.version('torch'))"
    result = subprocess.run([str(PY), "-c", probe], capture_output=True, text=True, check=False)
    return result.stdout.strip().split("+")[0] == TORCH


def install_torch() -> None:
    """Install the CPU build before anything requires torch, or stop: never several GB by accident."""
    if torch_installed():
        return
    if os.environ.get("TORCH") == "default":
        must(pip("install", "-qq", f"torch=={TORCH}"), "installing torch")
        return
    cpu = f"torch=={TORCH}+cpu"  # the label that only the CPU builds carry
    if pip("install", "-qq", cpu, quiet=True).returncode == 0:
        return
    source = ("--index-url", TORCH_CPU_INDEX, "--timeout", "10", "--retries", "1")
    if pip("install", "-qq", *source, cpu, quiet=True).returncode == 0:
        return
    raise SystemExit(
        f"setup: no CPU build of torch {TORCH}, neither where pip is configured to look nor on torch's own "
        "index of CPU builds; the default build would fetch several GB: allow it with "
        "`make setup TORCH=default`"
    )


def check_hashes(report: Path) -> int:
    """Compare what pip fetched with the hashes noted in constraints.txt; the number compared.

    pip itself cannot: one hash in a constraints file makes it refuse every editable install.
    """
    noted = {}
    for line in CONSTRAINTS.read_text().splitlines():
        if "# sha256:" in line:
            requirement, _, digest = line.partition("# sha256:")
            noted[tuple(requirement.strip().lower().split("=="))] = digest.strip()
    if not report.exists():
        return 0
    compared = 0
    for item in json.loads(report.read_text())["install"]:
        name = item["metadata"]["name"].lower().replace("_", "-").replace(".", "-")
        info = item.get("download_info", {})
        got = info.get("archive_info", {}).get("hashes", {}).get("sha256")
        want = noted.get((name, item["metadata"]["version"]))
        if got is None or want is None:
            continue
        compared += 1
        if got != want and same_platform():
            raise SystemExit(f"setup: {name} has sha256 {got}, constraints.txt says {want}")
    return compared


def same_platform() -> bool:
    """Whether the noted hashes, those of one platform's wheels, are meant for this one."""
    return platform.machine() == "x86_64" and sys.version_info[:2] == (3, 11)


def main() -> int:
    """Make or refresh the environment."""
    started = time.monotonic()
    lines = missing()
    for line in lines:
        print(f"setup: {line}", file=sys.stderr)
    if lines:
        return 2
    lack = native_lack()
    folders = [d for d in distributions() if d != NATIVE or not lack]
    mark = fingerprint(not lack)
    if PY.exists() and STAMP.exists() and STAMP.read_text() == mark:
        return 0
    WORK.mkdir(exist_ok=True)
    STAMP.unlink(missing_ok=True)
    if not PY.exists():
        print("setup: making .venv", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    must(pip("install", "-qq", PIP), "installing pip")
    print(f"setup: torch {TORCH}, CPU build", flush=True)
    install_torch()
    print("setup: build tools and every distribution of this tree, editable", flush=True)
    tools_report, report = WORK / "setup-tools.json", WORK / "setup.json"
    for old in (tools_report, report):
        old.unlink(missing_ok=True)
    constrained = ("install", "-qq", "-c", str(CONSTRAINTS))
    must(
        pip(*constrained, "--report", str(tools_report), *BUILD_TOOLS), "installing the build tools"
    )
    editables = [word for folder in folders for word in ("-e", f"./{folder}")]
    everything = ("--no-build-isolation", "--report", str(report), "-e", ".[dev]", *editables)
    must(pip(*constrained, *everything), "installing this tree")
    compared = check_hashes(tools_report) + check_hashes(report)
    STAMP.write_text(mark)
    if lack:
        print(
            f"setup: {lack}; without it lmcache-native is skipped: copies and digests run in pure Python, several times slower"
        )
    print(f"setup: {time.monotonic() - started:.0f} s, {compared} hashes compared")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
