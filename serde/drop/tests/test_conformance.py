"""The laws, for several shares."""

from __future__ import annotations

from typing import Any

import pytest
from lmcache_serde_drop import Drop, DropOptions

from lmcache_core.spi import KVSpec
from lmcache_core.testing.serde import SerdeTests


class TestDrop(SerdeTests):
    @pytest.fixture(params=[0.01, 0.3, 0.5, 1.0], autouse=True)
    def _share(self, request: pytest.FixtureRequest) -> None:
        self.keep = request.param

    def make_serde(self) -> Any:
        return Drop(DropOptions(keep=self.keep, recent=4, exact_tokens=0))

    def check_close(self, spec: KVSpec, before: bytes, after: bytes) -> None:
        step = spec.nbytes // (2 * spec.tokens)
        kept = 0
        for token in range(spec.tokens):
            places = [slice(at * step, (at + 1) * step) for at in (token, spec.tokens + token)]
            rows = [(before[place], after[place]) for place in places]
            same = [was == now for was, now in rows]
            kept += all(same)
            assert all(same) or not any(b"".join(now for _, now in rows))
        assert kept >= min(spec.tokens, max(4, round(self.keep * spec.tokens)))
