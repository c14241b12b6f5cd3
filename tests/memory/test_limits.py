from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_core.memory import limits
from lmcache_core.spi import ConfigError
from tests.memory.pools import make_arena

MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n"}


def test_without_groups_ram_is_the_limit(tmp_path: Path) -> None:
    found = limits.available(write(tmp_path, MEMINFO))
    assert found is not None
    assert found.available == 8000 * 1024
    assert "MemAvailable" in found.source


def test_nothing_known_is_no_limit(tmp_path: Path) -> None:
    assert limits.available(str(tmp_path)) is None


@pytest.mark.parametrize("mount", ["sys/fs/cgroup", "sys/fs/cgroup/unified"])
def test_tightest_group_upwards_counts(tmp_path: Path, mount: str) -> None:
    root = write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/pod/engine\n",
            f"{mount}/pod/engine/memory.max": "max\n",
            f"{mount}/pod/engine/memory.current": "100\n",
            f"{mount}/pod/memory.max": "5000000\n",
            f"{mount}/pod/memory.current": "2000000\n",
            f"{mount}/pod/memory.stat": "anon 5\ninactive_file 300000\nactive_file 700000\n",
        },
    )
    found = limits.available(root)
    assert found is not None
    assert found.available == 5_000_000 - 2_000_000 + 1_000_000
    assert found.source.endswith("pod/memory.max")


def test_first_version_of_groups_is_read_too(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n",
            # as seen inside a container: the group itself is the root of the mount
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000000\n",
            "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 5000\n",
        },
    )
    found = limits.available(root)
    assert found is not None
    assert found.available == 2_005_000


def test_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "100\n",
            "sys/fs/cgroup/memory.current": "200\n",
        },
    )
    found = limits.available(root)
    assert found is not None
    assert found.available == 0


def test_pool_beyond_the_limit_is_refused_with_the_size_that_fits() -> None:
    limit = limits.Limit(100 * MIB, "memory.max of the pod")
    with pytest.raises(ConfigError, match=r"150 MiB .* 100 MiB .*memory.max of the pod.* 93MiB"):
        make_arena(150 * MIB, available=lambda: limit)
    make_arena(93 * MIB, available=lambda: limit).close()
    make_arena(150 * MIB, available=lambda: limit, overcommit=True).close()


def test_growth_stops_where_memory_ends_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    left = iter([100 * MIB, 100 * MIB, MIB, MIB, MIB])
    arena = make_arena(
        8 * MIB,
        segment_nbytes=4 * MIB,
        available=lambda: limits.Limit(next(left), "RAM"),
    )
    assert arena.grow() is not None
    assert arena.grow() is None
    assert arena.grow() is None
    assert arena.reserved == 4 * MIB
    (record,) = caplog.records
    assert "pool stays at 4 MiB of 8 MiB: 1 MiB left (RAM)" in record.getMessage()


def test_sizes_for_people() -> None:
    assert [limits.text(n) for n in (17, 1 << 10, 3 << 29, 5 << 40)] == [
        "17 bytes", "1 KiB", "1.5 GiB", "5 TiB",
    ]  # fmt: skip
