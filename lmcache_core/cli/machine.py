"""What ``lmcache doctor`` looks at on the machine itself. Everything is read, nothing is changed."""

from __future__ import annotations

import importlib.util
import json
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from lmcache_core import ops
from lmcache_core.cli.finding import Finding
from lmcache_core.memory.limits import available, fields, read, text

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
    kernel, machine = platform.system(), platform.machine()
    yield Finding.judged(
        kernel == "Linux", "python", f"{platform.python_version()} on {kernel} {machine}",
        "warning", "only core, memory tier and CLI work off Linux",
    )  # fmt: skip
    if limit := available(str(root)):
        yield Finding("memory", "good", f"{text(limit.available)} to be had, by {limit.source}")
    yield huge_pages(root)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    yield Finding.judged(
        unlimited, "locked memory", "unlimited" if unlimited else f"{soft >> 10} KiB", "note",
        "accelerators and RDMA pin the arena: raise it with `ulimit -l unlimited` or LimitMEMLOCK=infinity",
    )  # fmt: skip
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = f"raise it with `ulimit -n {min(most, 65536)}`"
    enough = files >= 1024 or files == resource.RLIM_INFINITY
    yield Finding.judged(enough, "open files", str(files), "warning", remedy)
    present = [name for name, pattern in DEVICES.items() if any(root.glob(pattern))]
    yield Finding("device files", "note", ", ".join(present) or "none of an accelerator")


def memory_limit(root: Path = ROOT) -> int:
    """Bytes this process may still take."""
    found = available(str(root))
    return found.available if found else 0


def huge_pages(root: Path = ROOT) -> Finding:
    """Whether a pool with ``huge_pages`` would get them."""
    free = fields(root / "proc/meminfo").get("HugePages_Free:", 0)
    modes = read(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled")
    transparent = modes[modes.find("[") + 1 : modes.find("]")] if "[" in modes else "never"
    return Finding.judged(
        bool(free) or transparent not in ("never", "deny"), "huge pages",
        f"{free} reserved and free, transparent ones for shared memory: {transparent}",
        "note", "reserve some with `sysctl vm.nr_hugepages=N` if a tier asks for them",
    )  # fmt: skip


def native() -> Finding:
    """Which implementation of the byte operations runs."""
    found = ops.implementation()
    remedy = "install lmcache-native; without it copies are several times slower"
    return Finding.judged(found.startswith("native"), "byte operations", found, "warning", remedy)


def torch(python: str = sys.executable) -> Finding:
    """Whether torch is there and sees an accelerator; asked in a process of its own, which may crash or hang."""
    if importlib.util.find_spec("torch") is None:
        remedy = "engines bring it; the core does not need it"
        return Finding("torch", "note", "not installed", remedy)
    command = [python, "-c", _ASK_TORCH]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        found = f"import torch did not end within {TORCH_TIMEOUT_S} s"
        return Finding("torch", "fault", found, "check the device driver")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        remedy = "reinstall torch for this machine"
        return Finding("torch", "fault", f"import torch failed: {last}", remedy)
    version, kind, count = json.loads(done.stdout)
    devices = f"{count} x {kind}" if kind else "no accelerator"
    return Finding("torch", "good", f"{version}, {devices}")
