"""The laws for every mode, natively and in numpy."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from lmcache_serde_quant import MODES, Quant, QuantOptions

from lmcache_core import ops
from lmcache_core.spi import KVSpec
from lmcache_core.testing.serde import SerdeTests

ERROR = {"int8": 0.01, "int8c": 0.015, "e4m3": 0.04, "e5m2": 0.08, "turbo3": 0.25, "int3h": 0.25}
"""Root of the mean square of errors over that of normally distributed values; 0.15 for four bits."""


def floats(data: bytes) -> list[float]:
    return [struct.unpack("<f", b"\0\0" + data[at : at + 2])[0] for at in range(0, len(data), 2)]


class Modes(SerdeTests):
    @pytest.fixture(params=sorted(MODES), autouse=True)
    def _mode(self, request: pytest.FixtureRequest) -> None:
        self.mode = request.param

    def make_serde(self) -> Any:
        return Quant(QuantOptions(mode=self.mode, group=32))

    def check_close(self, spec: KVSpec, before: bytes, after: bytes) -> None:
        was, now = floats(before), floats(after)
        error = sum((a - b) ** 2 for a, b in zip(was, now, strict=True))
        assert error <= ERROR.get(self.mode, 0.15) ** 2 * sum(a * a for a in was)


@pytest.mark.skipif(ops.extra("quant_encode") is None, reason="lmcache-native is not installed")
class TestNative(Modes):
    pass


class TestNumpy(Modes):
    @pytest.fixture(autouse=True)
    def _without_native(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ops, "extra", lambda name: None)
