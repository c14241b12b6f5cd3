"""The laws for both codecs, natively and in numpy, on values like those the tables were made for.

It stands alone: it also runs where only the wheels are installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmcache_serde_cachegen import CacheGen, CacheGenOptions, Klt, KltOptions
from numpy.typing import NDArray

from lmcache_core import ops
from lmcache_core.spi import KVSpec
from lmcache_core.testing.serde import SerdeTests, kv_spec

ERROR = {"klt": 0.08, "cachegen": 0.2}
"""Root of the mean square of errors over that of the values, at level 2."""


def memory(seed: int, tokens: int) -> NDArray[Any]:
    """Two layers of two heads of 16: channels of different size and mean."""
    model, draw = np.random.default_rng(1), np.random.default_rng(seed)
    scale, mean = model.random((2, 2, 1, 2, 16)), model.standard_normal((2, 2, 1, 2, 16))
    return (draw.standard_normal((2, 2, tokens, 2, 16)) * scale + mean).astype(np.float32)


@cache
def tables() -> bytes:
    kv = memory(2, 400)
    slopes = np.random.default_rng(3).standard_normal(kv.shape).astype(np.float32)
    return Klt.calibrate([(kv, slopes)], [], model="nobody's")


def floats(data: bytes) -> NDArray[Any]:
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)


class Both(SerdeTests):
    @pytest.fixture(params=sorted(ERROR), autouse=True)
    def _codec(self, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        (tmp_path / "it").write_bytes(tables())
        self.name, self.path = request.param, str(tmp_path / "it")
        self.made: Any = None

    def make_serde(self) -> Any:
        if self.made is None:  # not in the fixture: what is native is chosen here
            path: Any = self.path
            self.made = (
                Klt(KltOptions(path)) if self.name == "klt" else CacheGen(CacheGenOptions(path))
            )
        return self.made

    def samples(self) -> Iterator[tuple[KVSpec, bytes]]:
        for number, (tokens, layer) in enumerate([(48, 0), (77, 1)]):
            bits = memory(number, tokens)[layer].reshape(-1).view(np.uint32)
            yield kv_spec(tokens=tokens, layer=layer), (bits >> 16).astype("<u2").tobytes()

    def check_close(self, spec: KVSpec, before: bytes, after: bytes) -> None:
        was, now = floats(before), floats(after)
        assert ((was - now) ** 2).sum() <= ERROR[self.name] ** 2 * (was**2).sum()


@pytest.mark.skipif(ops.extra("basis_encode") is None, reason="lmcache-native is not installed")
class TestNative(Both):
    pass


class TestNumpy(Both):
    @pytest.fixture(autouse=True)
    def _without_native(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ops, "extra", lambda name: None)

    def test_it_is_numpy(self) -> None:
        assert self.make_serde()._encode.__module__.endswith("reference")
