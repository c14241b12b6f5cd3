"""What ``lmcache doctor`` looks at on the machine itself. Everything is read, nothing is changed."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from lmcache_core.cli.doctor import Finding
from lmcache_core.memory.limits import available, text

ROOT = Path("/")
TORCH_TIMEOUT_S = 120
DEVICES = {
    "NVIDIA": "dev/nvidia[0-9]*",
    "AMD": "dev/kfd",
    "Intel": "dev/dri/renderD*",
    "Gaudi": "dev/accel/accel*",
}  # fmt: skip
_ASK_TORCH = """
import json, torch
kind = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
count = torch.accelerator.device_count() if kind is not None else 0
print(json.dumps([torch.__version__, kind.type if kind is not None else "", count]))
"""


def system(root: Path = ROOT) -> Iterator[Finding]:
    """Python, platform, memory limit, huge pages, limits of the process, device files."""
    version, machine = platform.python_version(), f"{platform.system()} {platform.machine()}"
    if platform.system() == "Linux":
        yield Finding("python", "good", f"{version} on {machine}")
    else:
        yield Finding(
            "python",
            "warning",
            f"{version} on {machine}",
            "only core, memory tier and CLI work off Linux",
        )
    if limit := available(str(root)):
        yield Finding("memory", "good", f"{text(limit.available)} to be had, by {limit.source}")
    yield huge_pages(root)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Finding("locked memory", "good", "unlimited")
    else:
        yield Finding(
            "locked memory", "note", f"{soft >> 10} KiB",
            "accelerators and RDMA pin the arena: raise it with `ulimit -l unlimited` or LimitMEMLOCK=infinity",
        )  # fmt: skip
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files >= 1024:
        yield Finding("open files", "good", str(files))
    else:
        yield Finding(
            "open files", "warning", str(files), f"raise it with `ulimit -n {min(most, 65536)}`"
        )
    present = [name for name, pattern in DEVICES.items() if any(root.glob(pattern))]
    yield Finding("device files", "note", ", ".join(present) or "none of an accelerator")


def memory_limit(root: Path = ROOT) -> int:
    """Bytes this process may still take."""
    found = available(str(root))
    return found.available if found else 0


def huge_pages(root: Path = ROOT) -> Finding:
    """Whether a pool with ``huge_pages`` would get them."""
    free = _meminfo(root).get("HugePages_Free", 0)
    modes = "".join(_lines(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    transparent = modes[modes.find("[") + 1 : modes.find("]")] if "[" in modes else "never"
    found = f"{free} reserved and free, transparent ones for shared memory: {transparent}"
    if free or transparent not in ("never", "deny"):
        return Finding("huge pages", "good", found)
    return Finding(
        "huge pages",
        "note",
        found,
        "reserve some with `sysctl vm.nr_hugepages=N` if a tier asks for them",
    )


def native() -> Finding:
    """Which implementation of the byte operations runs."""
    from lmcache_core import ops

    found = ops.implementation()
    if found.startswith("native"):
        return Finding("byte operations", "good", found)
    return Finding(
        "byte operations",
        "warning",
        found,
        "install lmcache-native; without it copies are several times slower",
    )


def torch(python: str = sys.executable) -> Finding:
    """Whether torch is there and sees an accelerator; asked in a process of its own, which may crash or hang."""
    if importlib.util.find_spec("torch") is None:
        return Finding(
            "torch", "note", "not installed", "engines bring it; the core does not need it"
        )
    try:
        done = subprocess.run(
            [python, "-c", _ASK_TORCH],
            capture_output=True,
            text=True,
            timeout=TORCH_TIMEOUT_S,
            env=os.environ.copy(),
        )
    except subprocess.TimeoutExpired:
        return Finding(
            "torch",
            "fault",
            f"import torch did not end within {TORCH_TIMEOUT_S} s",
            "check the device driver",
        )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return Finding(
            "torch", "fault", f"import torch failed: {last}", "reinstall torch for this machine"
        )
    version, kind, count = json.loads(done.stdout)
    return Finding(
        "torch", "good", f"{version}, {f'{count} x {kind}' if kind else 'no accelerator'}"
    )


def _meminfo(root: Path) -> dict[str, int]:
    found = {}
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        if number.isdigit():
            found[name] = int(number) * (1024 if unit == "kB" else 1)
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
