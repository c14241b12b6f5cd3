"""The house tests look at the tree as a whole; the scripts they check are in .ci."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / ".ci"))


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the tree."""
    return ROOT
