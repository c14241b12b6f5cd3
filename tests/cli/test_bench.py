"""``lmcache bench tier``: rates of configured tiers, and what keeps one from being measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmcache_core.cli import main
from tests.registry.dists import BACKEND, MakeDist

SMALL = ("--size", "64KiB,1MiB", "--total", "2MiB", "--laps", "2")


@pytest.fixture
def written(tmp_path: Path) -> Path:
    file = tmp_path / "kv.yaml"
    file.write_text(
        "tiers:\n- cpu: {size: 64MiB, name: hot}\n"
        f"- disk: {{size: 64MiB, path: '{tmp_path / 'kv'}'}}\n- memory: {{size: 64MiB}}\n"
    )
    return file


def test_every_tier_is_measured_at_every_size(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "tier", "--config", str(written), "--json", *SMALL]) == 0
    rows = json.loads(capsys.readouterr().out)
    sizes = [(row["tier"], row["value_kib"], row["values"]) for row in rows]
    assert sizes == [
        (name, *of) for name in ("hot", "disk", "memory") for of in ((64, 32), (1024, 2))
    ]
    for row in rows:
        assert min(row["store_mb_s"], row["load_mb_s"], row["store_cpu_s_gib"]) > 0
    assert main(["bench", "tier", "disk", "--config", str(written), *SMALL]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["tier", "value_kib", "values"]
    assert [line.split()[0] for line in lines] == ["disk", "disk"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nope"], "no tier 'nope' is configured; there are: hot, disk, memory"),
        (["hot", "--size", "much"], "not a size: 'much'"),
    ],
)
def test_a_mistake_is_one_line(
    written: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "tier", "--config", str(written), *words]) == 2
    assert said in capsys.readouterr().err


def test_an_unreachable_tier_is_said_and_the_others_are_measured(
    make_dist: MakeDist, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = BACKEND.replace(
        "    async def aclose(self): ...",
        "    async def aclose(self): ...\n    async def open(self): raise ConnectionError('refused')",
    )
    make_dist("acme", {"backends": {"far": "MODULE:Backend"}}, silent)
    file = tmp_path / "kv.yaml"
    file.write_text("tiers:\n- memory: {size: 64MiB}\n- far:\n")
    assert main(["bench", "tier", "--config", str(file), "--json", *SMALL]) == 3
    captured = capsys.readouterr()
    assert [row["tier"] for row in json.loads(captured.out)] == ["memory"] * 2
    assert captured.err == (
        "tier far: unreachable: refused; start the store, or correct where it is expected\n"
    )
