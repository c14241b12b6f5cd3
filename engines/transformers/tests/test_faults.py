"""The disk under a model is damaged between two processes: answers stay the same, hits drop, somebody is told."""

import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.transformers.tests.tiny import cached, greedy, make_model, open_cache, prompt

IDS = prompt(67)
CHUNKS = 8


def values(folder: Path) -> list[Path]:
    """Files of values, in the order of their names; each is several kilobytes."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 4096]
    assert len(found) == CHUNKS
    return sorted(found)


def truncate(folder: Path) -> None:
    for path in values(folder):
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)


def flip_bits(folder: Path) -> None:
    rng = random.Random(3)
    for path in values(folder):
        data = bytearray(path.read_bytes())
        # An aligned write pads the file with zeros that mean nothing: stay in the header and the first rows.
        data[rng.randrange(4096, 4096 + 512)] ^= 1 << rng.randrange(8)
        path.write_bytes(data)


def exchange(folder: Path) -> None:
    """Every file holds another one's good value."""
    paths = values(folder)
    contents = [path.read_bytes() for path in paths]
    for path, data in zip(paths, contents[1:] + contents[:1], strict=True):
        path.write_bytes(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A disk tier that holds all chunks of the prompt."""
    made = tmp_path / "kv"
    with open_cache(tiers=[{"disk": {"path": str(made), "size": "64MiB"}}]) as cache:
        greedy(cached(make_model(), cache), IDS)
    return made


def again(folder: Path) -> tuple[int, dict[str, float]]:
    """What a new process reuses, its answer being right; and what the tier counted as damage."""
    model = make_model()
    with open_cache(tiers=[{"disk": {"path": str(folder), "size": "64MiB"}}]) as cache:
        mine = cached(model, cache)
        assert greedy(mine, IDS) == greedy(model, IDS)
        damaged = {
            dict(sample.labels)["reason"]: sample.value
            for sample in cache.metrics.snapshot().matching("lmcache_tier_damaged_total")
        }
        return mine.last.reused[0], damaged


def test_an_unharmed_folder_serves_every_full_chunk(folder: Path) -> None:
    assert again(folder) == (64, {})


def test_a_deleted_folder_is_an_empty_one(folder: Path) -> None:
    shutil.rmtree(folder)
    assert again(folder) == (0, {})
    assert again(folder) == (64, {})


@pytest.mark.parametrize("harm", [truncate, flip_bits, exchange])
def test_harmed_values_are_misses_named_in_a_warning_and_repaired(
    folder: Path, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    harm(folder)
    with caplog.at_level(logging.WARNING):
        reused, damaged = again(folder)
    assert reused == 0
    told = [r for r in caplog.records if r.levelno >= logging.WARNING and "disk" in r.name]
    assert sum(damaged.values()) or told, "nobody was told"
    assert again(folder)[0] == 64


def test_a_folder_that_vanishes_while_it_serves_costs_hits_only(folder: Path) -> None:
    model = make_model()
    other = prompt(40, seed=9)
    with open_cache(tiers=[{"disk": {"path": str(folder), "size": "64MiB"}}]) as cache:
        mine = cached(model, cache)
        shutil.rmtree(folder)
        for ids in (IDS, other, IDS):
            assert greedy(mine, ids) == greedy(model, ids)
