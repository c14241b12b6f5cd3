"""Lengths, forms and refusals of the lossless serdes."""

from __future__ import annotations

import pytest
from lmcache_serde_lossless import X12, XR, X12Options, XROptions, Zstd, ZstdOptions

from lmcache_core.spi import ConfigError, Corrupt, Interior, Key, KVSpec, SegmentSpec, ValueInfo
from lmcache_core.testing.serde import bfloat16_noise, kv_spec

SPEC = kv_spec(tokens=256, head_dim=64)


def encoded(serde, spec, payload):
    bound = serde.bound(spec) if isinstance(serde, (X12, XR)) else serde.bound(spec.nbytes)
    into = bytearray(bound)
    info = ValueInfo(Key(bytes(32), bytes(32)), spec)
    return bytes(into[: serde.encode(info, memoryview(payload), memoryview(into))])


def decoded(serde, spec, coded):
    back = bytearray(spec.nbytes)
    serde.decode(ValueInfo(Key(bytes(32), bytes(32)), spec), memoryview(coded), memoryview(back))
    return bytes(back)


def test_x12_has_one_length_for_one_form_and_whole_sectors():
    lengths = {
        len(encoded(X12(X12Options()), SPEC, bfloat16_noise(SPEC.nbytes, seed)))
        for seed in range(5)
    }
    (length,) = lengths
    assert length % 512 == 0
    assert SPEC.nbytes / length > 1.32


def test_xr_is_smaller_than_x12_and_leaves_noise_alone():
    payload = bfloat16_noise(SPEC.nbytes, 1)
    assert SPEC.nbytes / len(encoded(XR(XROptions()), SPEC, payload)) > 1.47
    import random

    noise = random.Random(1).randbytes(SPEC.nbytes)
    assert len(encoded(XR(XROptions()), SPEC, noise)) <= SPEC.nbytes + 20
    assert len(encoded(X12(X12Options()), SPEC, noise)) <= SPEC.nbytes + 512


def test_x12_declines_what_has_no_such_exponent():
    with pytest.raises(ValueError, match="for bfloat16"):
        encoded(X12(X12Options()), kv_spec(dtype="float16"), bytes(kv_spec().nbytes))


def test_pages_are_coded_where_their_elements_are_named():
    spec = KVSpec("uint8", 256, 1, 0, 0, Interior.PAGE, (SegmentSpec(0, 0, 0, SPEC.nbytes),))
    payload = bfloat16_noise(spec.nbytes, 2)
    with pytest.raises(ValueError, match="left alone"):
        encoded(XR(XROptions()), spec, payload)
    coded = encoded(XR(XROptions(pages=2)), spec, payload)
    assert spec.nbytes / len(coded) > 1.4
    assert decoded(XR(XROptions()), spec, coded) == payload


def test_every_dtype_of_a_cache_comes_back():
    """Seen in LMCache#4118."""
    for dtype, nbytes in (("float16", 2), ("float32", 4), ("float8_e4m3fn", 1), ("int8", 1)):
        segment = SegmentSpec(0, 0, 2, 2 * 64 * 2 * 64 * nbytes)
        spec = KVSpec(dtype, 64, 2, 2, 64, Interior.ROWS, (segment,))
        payload = bfloat16_noise(spec.nbytes, 3)
        assert decoded(XR(XROptions()), spec, encoded(XR(XROptions()), spec, payload)) == payload


def test_a_frame_that_says_another_length_is_not_decompressed():
    zstd = Zstd(ZstdOptions())
    big = KVSpec("uint8", 1, 1, 0, 0, Interior.PAGE, (SegmentSpec(0, 0, 0, 1 << 20),))
    bomb = encoded(zstd, big, bytes(1 << 20))
    assert len(bomb) < 200
    with pytest.raises(Corrupt, match="no frame of"):
        decoded(zstd, SPEC, bomb)


def test_options_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="level"):
        ZstdOptions(level=20)
    with pytest.raises(ConfigError, match="bytes per element"):
        XROptions(pages=3)
