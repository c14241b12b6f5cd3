"""A writer killed at a hundred random moments; ``make nightly-storage`` kills a thousand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_no_value_is_torn_or_lost_when_its_writer_is_killed(tmp_path):
    """Seen in sglang#39880."""
    script = Path(__file__).with_name("killing.py")
    command = [sys.executable, str(script), "--kills", "100", "--folder", str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    counts = json.loads(finished.stdout)
    assert counts["kills"] == 100
    assert counts["acknowledged"] > 100, "killed before anything was written"
    assert counts["whole"] >= counts["acknowledged"]
