"""Tests of the connector in a real vLLM: collected where vLLM is installed, which is never in `.venv`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
LONG = bool(os.environ.get("LMCACHE_TEST_LONG"))
collect_ignore_glob = ["test_*.py"]
if find_spec("vllm"):
    collect_ignore_glob = []
    sys.path.insert(0, str(HERE))  # what these tests share
if not LONG:
    collect_ignore_glob.append("test_long*.py")


@pytest.fixture(scope="session")
def model() -> Callable[[str], Path]:
    """Folder of a tiny model, made once for all runs."""
    from models import make

    return lambda kind: make(HERE.parents[3] / ".lmcache-work/vllm-models", kind)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engines and daemons of a file write."""
    return tmp_path_factory.mktemp("vllm")
