"""The laws of every serde, and the error that this one states."""

import numpy as np
from lmcache_int8_example import Int8, Int8Options

from lmcache_core.spi import KVSpec, TensorSerde
from lmcache_core.testing.serde import SerdeTests


class TestInt8(SerdeTests):
    def make_serde(self) -> TensorSerde:
        return Int8(Int8Options())

    def check_close(self, spec: KVSpec, before: bytes, after: bytes) -> None:
        x, y = (
            (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").reshape(-1, spec.head_dim)
            for data in (before, after)
        )
        assert (np.abs(x - y) <= np.abs(x).max(axis=1, keepdims=True) / 127 + 1e-30).all()
