"""The laws, natively and in plain Python."""

from __future__ import annotations

import random
from typing import Any

import pytest
from lmcache_serde_lossless import X12, XR, X12Options, XROptions, Zstd, ZstdOptions, reference

from lmcache_core import codecs, ops
from lmcache_core.testing.serde import SerdeTests, bfloat16_noise, kv_spec


class TestX12(SerdeTests):
    def make_serde(self) -> Any:
        return X12(X12Options())


class TestXR(SerdeTests):
    def make_serde(self) -> Any:
        return XR(XROptions(pages=1))

    def samples(self) -> Any:
        yield from super().samples()
        for dtype in ("float16", "float32"):
            spec = kv_spec(tokens=256, head_dim=64, dtype=dtype)
            yield spec, bfloat16_noise(spec.nbytes, 9)


class TestZstd(SerdeTests):
    def make_serde(self) -> Any:
        return Zstd(ZstdOptions())


class InPython(SerdeTests):
    @pytest.fixture(autouse=True)
    def _without_native(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert codecs.rans_encode  # bound now: the names stay for the whole process
        monkeypatch.setattr(ops, "extra", lambda name: None)

    def samples(self) -> Any:
        spec = kv_spec(tokens=5)
        yield spec, bfloat16_noise(spec.nbytes, 1)


class TestX12InPython(InPython):
    def make_serde(self) -> Any:
        return X12(X12Options())


class TestXRInPython(InPython):
    def make_serde(self) -> Any:
        return XR(XROptions())


@pytest.mark.skipif(ops.extra("x12_encode") is None, reason="lmcache-native is not installed")
@pytest.mark.parametrize("noise", [0.0, 0.003, 0.02, 1.0])
@pytest.mark.parametrize(("tokens", "dim"), [(1, 5), (3, 16), (77, 16), (130, 48)])
def test_both_forms_write_the_same_bytes(tokens: int, dim: int, noise: float) -> None:
    draw = random.Random(tokens)
    spec = kv_spec(tokens=tokens, head_dim=dim)
    payload = bytearray(bfloat16_noise(spec.nbytes, 3))
    for at in range(0, len(payload), 2):
        if draw.random() < noise:
            payload[at : at + 2] = draw.randbytes(2)
    channels = 2 * dim
    cases = [("x12", (2,)), ("xr", (2, 2, channels)), ("xr", (1, 1, 4 * channels))]
    if not spec.nbytes % 8:
        cases.append(("xr", (2, 4, channels)))
    for name, shape in cases:
        bound = getattr(reference, f"{name}_bound")(spec.nbytes, shape[0])
        results = []
        for encode in (ops.extra(f"{name}_encode"), getattr(reference, f"{name}_encode")):
            into = bytearray(bound)
            results.append(bytes(into[: encode(memoryview(payload), memoryview(into), *shape)]))
        assert results[0] == results[1], name
        for decode in (ops.extra(f"{name}_decode"), getattr(reference, f"{name}_decode")):
            back = bytearray(len(payload))
            assert decode(memoryview(results[0]), memoryview(back), *shape)
            assert back == payload
