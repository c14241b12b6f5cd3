"""``x12`` and ``xr``: what is compressible in floating-point numbers is the exponent."""

from __future__ import annotations

from lmcache_core import ops
from lmcache_core.spi import Corrupt, Interior, KVSpec, TensorSerde, ValueInfo
from lmcache_serde_lossless import reference
from lmcache_serde_lossless.config import X12Options, XROptions

ITEM = {
    "bfloat16": 2, "float16": 2, "float32": 4, "uint8": 1, "int8": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip
"""Bytes of the element types that ``xr`` knows."""


class X12(TensorSerde):
    """bfloat16 in 12 bits and a little: each exponent by a code of four bits, what has no code beside it.

    The length depends on the form alone as long as no plane has more than one exponent in 256 without a
    code, and is a multiple of 512 always: slots of equal, aligned size. After the idea published as SplitZip
    (arXiv 2605.01708); the layout is described in the reference.
    """

    config_type = X12Options
    wire_id = "x12"
    lossless = True

    def __init__(self, config: X12Options, /) -> None:
        self._encode = ops.extra("x12_encode") or reference.x12_encode
        self._decode = ops.extra("x12_decode") or reference.x12_decode

    def bound(self, spec: KVSpec, /) -> int:
        return reference.x12_bound(spec.nbytes, spec.planes)

    def encode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> int:
        if info.spec.dtype != "bfloat16":
            raise ValueError(f"x12 is for bfloat16, not for {info.spec.dtype}")
        return int(self._encode(source, into, info.spec.planes))

    def decode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> None:
        if info.spec.dtype != "bfloat16" or not self._decode(source, into, info.spec.planes):
            raise Corrupt(
                f"x12: {source.nbytes} bytes are no {into.nbytes} encoded", operation="load"
            )


class XR(TensorSerde):
    """Floats with their exponents coded by their entropy (rANS), a table for each class of channels.

    One byte in front says how many bytes an element has. Planes that do not get smaller stay as they are.
    """

    config_type = XROptions
    wire_id = "xr"
    lossless = True

    def __init__(self, config: XROptions, /) -> None:
        self.config = config
        self._encode = ops.extra("xr_encode") or reference.xr_encode
        self._decode = ops.extra("xr_decode") or reference.xr_decode

    def bound(self, spec: KVSpec, /) -> int:
        return 1 + reference.xr_bound(spec.nbytes, spec.planes)

    def encode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> int:
        rows = info.spec.interior is Interior.ROWS
        item = ITEM.get(info.spec.dtype, 0) if rows else self.config.pages
        if not item:
            raise ValueError(f"xr: {info.spec.interior.value} of {info.spec.dtype} are left alone")
        into[0] = item
        shape = _shape(info.spec, item)
        return 1 + int(self._encode(source, into[1:], shape[0], item, shape[1]))

    def decode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> None:
        good = source.nbytes > 0 and source[0] in (1, 2, 4)
        try:
            planes, channels = _shape(info.spec, source[0]) if good else (1, 1)
            good = good and self._decode(source[1:], into, planes, source[0], channels)
        except ValueError:  # an element length that does not fit this value
            good = False
        if not good:
            raise Corrupt(
                f"xr: {source.nbytes} bytes are no {into.nbytes} encoded", operation="load"
            )


def _shape(spec: KVSpec, item: int) -> tuple[int, int]:
    """Planes, and elements of one token in one plane.

    Raises:
        ValueError: the segment is no whole number of these.
    """
    planes = spec.planes if spec.interior is Interior.ROWS else 1
    if spec.nbytes % (planes * item):
        raise ValueError(f"{spec.nbytes} bytes are not {planes} planes of {item}-byte elements")
    rows = spec.tokens if spec.interior is Interior.ROWS else 0
    plane = spec.nbytes // (planes * item)
    return planes, plane // rows if rows and plane >= rows and not plane % rows else 1
