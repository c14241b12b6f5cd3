"""The serde from outside: within a hundred lines, and through the kit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.testing.test_example import code_lines, run_kit

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_serde"


def test_a_codec_takes_a_hundred_lines() -> None:
    counted = [code_lines(path) for path in EXAMPLE.rglob("*.py")]
    assert sum(counted) <= 100


def test_it_passes_the_kit(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    result = run_kit(EXAMPLE, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
