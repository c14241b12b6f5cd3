"""A stage that fails, takes too long or ran nothing is not green; a part that is not here says so."""

import sys

import nightly
import pytest
from stage import run_stage


def run(code: str, budget_s: float = 60) -> int:
    return run_stage("s", budget_s, [sys.executable, "-c", code])[0]


def test_a_stage_that_prints_and_ends_well_is_good(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("print('looked at 3 files')") == 0
    out = capfd.readouterr().out
    assert "looked at 3 files" in out
    assert "== s: " in out


def test_a_stage_that_printed_nothing_ran_nothing() -> None:
    assert run("pass") == 1


def test_a_failing_command_fails_its_stage() -> None:
    assert run("print('x'); raise SystemExit(5)") == 5


def test_twice_the_budget_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMCACHE_NO_BUDGETS", raising=False)
    assert run("print('x')", budget_s=0.0001) == 1


def test_an_unknown_or_absent_part_fails_with_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert nightly.main(["storag"]) == 2
    assert "known: bench" in capsys.readouterr().err
    commands = [command for _, part in nightly.PARTS.values() for command in part]
    assert [command for command in commands if not nightly.present(command)] == []
    monkeypatch.setitem(nightly.PARTS, "absent", (1, [["benchmarks/absent.py"]]))
    assert nightly.main(["absent"]) == 2
    assert "not in this tree" in capsys.readouterr().err
