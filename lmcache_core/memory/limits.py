"""How much memory this process may still take: RAM and every control group above it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True, slots=True)
class Limit:
    """The nearest limit: ``available`` bytes until ``source`` (a file) is reached."""

    available: int
    source: str


def available(root: str = "/", /) -> Limit | None:
    """The tightest of available RAM and the memory limits (v1 and v2) of all groups upwards.

    File cache counts as available, because the kernel gives it up first. None where the system tells nothing.

    Args:
        root: where ``proc`` and ``sys`` are found.
    """
    return min(_limits(Path(root)), key=lambda limit: limit.available, default=None)


def text(nbytes: int, /) -> str:
    """A size for people: ``1.5 GiB``."""
    for unit, name in _UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} bytes"


def _limits(root: Path) -> Iterator[Limit]:
    ram = fields(root / "proc/meminfo").get("MemAvailable:")
    if ram is not None:
        yield Limit(ram * 1024, "MemAvailable of /proc/meminfo")
    for line in read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mounts = ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
            names = ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            mounts = ["sys/fs/cgroup/memory"]
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        group = Path(path.lstrip("/"))
        for mount in mounts:
            for above in (group, *group.parents):
                yield from _group(root / mount / above, *names)


def _group(folder: Path, limit_name: str, usage_name: str, prefix: str) -> Iterator[Limit]:
    limit, usage = read(folder / limit_name).strip(), read(folder / usage_name).strip()
    if not limit.isdigit() or not usage.isdigit():
        return  # "max", or no such group in this mount
    stat = fields(folder / "memory.stat")
    cache = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
    yield Limit(max(0, int(limit) - int(usage) + cache), str(folder / limit_name))


def read(path: Path, /) -> str:
    """A file of the system, empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def fields(path: Path, /) -> dict[str, int]:
    """Whole numbers by the word in front of them, line by line."""
    pairs = (line.split() for line in read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}
