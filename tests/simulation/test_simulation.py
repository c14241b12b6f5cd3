"""The whole under faults, and proof that histories would notice bugs of every kind that users met."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.simulation.__main__ import OPERATIONS, found, history
from tests.simulation.planted import BUGS

SEEDS = int(os.environ.get("LMCACHE_SEEDS", "24"))
"""CI runs 1,000 in a stage of their own, nights 20,000."""
SAMPLE = [bug for bug in BUGS if SEEDS > 100 or bug.kind in ("LAY", "PER", "CAP", "OBS")]
"""The rest takes minutes; ``python -m tests.simulation --planted`` prints all."""


@pytest.mark.parametrize("part", range(4))
def test_no_history_of_the_whole_breaks_a_promise(part):
    outcomes = [history(seed) for seed in range(part, SEEDS, 4)]
    assert sum(sum(outcome.faults.values()) for outcome in outcomes) > 10 * len(outcomes)


@pytest.mark.parametrize("bug", SAMPLE, ids=lambda bug: bug.title)
def test_planted_bug_is_found(bug):
    assert found(bug, 2000, OPERATIONS) >= 0


def test_every_planted_bug_still_has_its_place():
    for bug in BUGS:
        with bug.planted():
            pass


def test_one_seed_is_one_history_in_every_process():
    code = (
        "from tests.simulation.__main__ import history;"
        "print(*[history(seed).digest for seed in range(6)])"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    outcomes = [history(seed) for seed in range(6)]
    assert any(each.faults["daemon killed"] for each in outcomes)
    here = [each.digest for each in outcomes]
    assert told == {" ".join(here) + "\n"}
