"""The laws for both codecs, natively and in numpy, on values like those the tables were made for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_core import ops
from lmcache_core.spi import KVSpec
from lmcache_core.testing.serde import SerdeTests
from serde.cachegen.tests import model

ERROR = {"klt": 0.08, "cachegen": 0.2}
"""Root of the mean square of errors over that of the values, at level 2."""


class Both(SerdeTests):
    @pytest.fixture(params=sorted(ERROR), autouse=True)
    def _codec(self, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        self.name = request.param
        self.serde = model.serde(self.name, model.tables_in(tmp_path))

    def make_serde(self) -> Any:
        return self.serde

    def samples(self) -> Iterator[tuple[KVSpec, bytes]]:
        for number, (tokens, layer) in enumerate([(48, 0), (77, 1)]):
            kv = model.memory(number, tokens=tokens)
            yield model.spec_of(tokens=tokens, layer=layer), model.bfloat16(kv[layer])

    def check_close(self, spec: KVSpec, before: bytes, after: bytes) -> None:
        was, now = model.floats(before), model.floats(after)
        assert ((was - now) ** 2).sum() <= ERROR[self.name] ** 2 * (was**2).sum()


@pytest.mark.skipif(ops.extra("basis_encode") is None, reason="lmcache-native is not installed")
class TestNative(Both):
    pass


class TestNumpy(Both):
    @pytest.fixture(autouse=True)
    def _without_native(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ops, "extra", lambda name: None)
