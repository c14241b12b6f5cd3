"""Importing the core and asking for help is quick, and pulls in no tensor library."""

import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

HEAVY = ("torch", "numpy", "transformers")
LMCACHE = str(Path(sysconfig.get_path("scripts")) / "lmcache")
IMPORT = "import lmcache_core, lmcache_core.spi, lmcache_core.registry"


def seconds(arguments: Sequence[str], times: int = 7) -> float:
    """Least time of several runs: what the machine does besides only ever adds."""
    best = float("inf")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    for _ in range(times):
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment
        )
        best = min(best, time.perf_counter() - started)
    return best


@pytest.mark.parametrize(
    "arguments", [["-c", IMPORT], ["-c", "import lmcache.cuda_ops"], [LMCACHE, "--help"]]
)
def test_no_tensor_library_is_imported(arguments: list[str]) -> None:
    """Seen in local-inference-lab/rtx6kpro#42, LMCache#4019."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, check=True
    )
    imported = {
        line.rpartition("|")[2].strip().split(".")[0] for line in result.stderr.splitlines()
    }
    assert "lmcache_core" in imported
    assert imported.isdisjoint(HEAVY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "arguments", "limit_s"),
    [
        ("import lmcache_core", ["-c", "import lmcache_core"], 0.10),
        ("the spi and the registry", ["-c", IMPORT], 0.25),
        ("lmcache --help", [LMCACHE, "--help"], 0.25),
    ],
)
def test_start_is_quick_beyond_a_bare_interpreter(
    what: str, arguments: list[str], limit_s: float
) -> None:
    bare = seconds(["-c", "pass"])
    spent = seconds(arguments) - bare
    assert spent <= limit_s, f"{what}: {spent:.3f} s beyond {bare:.3f} s"
