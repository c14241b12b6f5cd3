"""A hundred thousand damaged, cut and foreign values over all chains (nightly: a million, ``damaged.py``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_core import ops
from tests.storage.damaged import coders, frames, segments

for needed in ("lmcache_serde_lossless", "lmcache_serde_quant"):
    pytest.importorskip(needed)

CASES = 100_000 if ops.extra("quant_decode") else 2000


@pytest.mark.slow
def test_no_damage_gets_through_any_chain(tmp_path: Path) -> None:
    found = list(coders(tmp_path))
    each = CASES // (2 * len(found))
    for label, coder in found:
        assert frames(coder, each, 1) > 0.9 * each, label
        assert segments(coder, each, 2) > 0.1 * each, label
