"""What LMCache 0.5.6 says of its own storage: one run of its ``bench l2``, a round to warm up and five more."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from typing import Any

MIB = 1 << 20
ROUNDS = 5


def rates_of(
    command: str, adapter: dict[str, object], *, nbytes: int = 4 * MIB, count: int = 16
) -> dict[str, float]:
    """Bytes per second of ``store`` and ``load``, for ``count`` values of ``nbytes``.

    Args:
        command: runs the peer's ``lmcache``.
        adapter: its adapter, with all options.
    """
    line = [
        *shlex.split(command), "bench", "l2", "--num-keys", str(count), "--rounds", str(ROUNDS),
        "--no-skip-verify", "--l2-adapter", json.dumps(adapter),
        "--data-size-kb", str(nbytes // 1024), "--l1-align-bytes", "4096", "--format", "json",
    ]  # fmt: skip
    environment = os.environ | {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
    done = subprocess.run(line, check=True, capture_output=True, text=True, env=environment)
    text = done.stdout[done.stdout.index("\n{") : done.stdout.rindex("\n}") + 2]
    found = _operations(json.loads(text))
    return {each["operation"].lower(): each["throughput_avg_mbps"] * MIB for each in found}


def _operations(document: object) -> list[dict[str, Any]]:
    """The records of single operations, wherever they are."""
    if not isinstance(document, dict):
        return []
    if "operation" in document:
        return [document]
    return [each for value in document.values() for each in _operations(value)]
