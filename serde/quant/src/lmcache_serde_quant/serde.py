"""``quant``: a header, then each plane by its code."""

from __future__ import annotations

import struct

from lmcache_core import ops
from lmcache_core.spi import Corrupt, KVSpec, TensorSerde, ValueInfo
from lmcache_serde_quant import reference
from lmcache_serde_quant.config import MODES, PlaneCode, QuantOptions

HEADER = struct.Struct("<BBHI")
"""Code of the keys, code of the values (0, 0: as they are), tokens of a group, length of what follows."""
ELEMENTS = {"bfloat16": 0, "float16": 1, "float32": 2}


class Quant(TensorSerde):
    """Keys and values in fewer bits.

    After KIVI (arXiv 2402.02750: keys per channel, values per token), QuaRot (arXiv 2404.00456: Hadamard
    transforms) and TurboQuant (arXiv 2504.19874: random rotation, then levels of a normal distribution).
    """

    config_type = QuantOptions
    wire_id = "quant"
    lossless = False
    error_bound = (
        "half a step of the scale kept beside it; a step is the largest magnitude / 127 (8 bits) or the "
        "range / 15 (4) or / 7 (3) of a token's head or of a channel in a group of tokens"
    )

    def __init__(self, config: QuantOptions, /) -> None:
        self.config = config
        self.exact_tokens = config.exact_tokens
        self.codes = MODES[config.mode]
        wide = 64 if self.codes[0] is PlaneCode.INT4_CHANNEL else 256
        self.group = config.group or wide
        self._encode = ops.extra("quant_encode") or reference.encode
        self._decode = ops.extra("quant_decode") or reference.decode

    def bound(self, spec: KVSpec, /) -> int:
        return HEADER.size + max(spec.nbytes, sum(self._sizes(spec, self.codes, self.group)))

    def encode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> int:
        spec, codes = info.spec, self.codes
        if spec.dtype not in ELEMENTS:
            raise ValueError(f"quant is for 16 and 32-bit floats, not for {spec.dtype}")
        if spec.segments[0].layer in self.config.exact_layers:
            HEADER.pack_into(into, 0, 0, 0, 0, source.nbytes)
            into[HEADER.size : HEADER.size + source.nbytes] = source
            return HEADER.size + source.nbytes
        sizes = self._sizes(spec, codes, self.group)
        if not sizes:
            raise ValueError(f"quant: heads of {spec.head_dim} elements are no multiple of 8")
        shape, step, at = _shape(spec, self.group), source.nbytes // len(sizes), HEADER.size
        for plane, (code, size) in enumerate(zip(codes, sizes, strict=False)):
            taken = source[plane * step : plane * step + step]
            if not self._encode(code, ELEMENTS[spec.dtype], taken, into[at : at + size], *shape):
                raise ValueError("quant: an element is not finite or has no scale in 16 bits")
            at += size
        HEADER.pack_into(into, 0, *codes, self.group, at - HEADER.size)
        return at

    def decode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> None:
        spec = info.spec
        if source.nbytes < HEADER.size or spec.dtype not in ELEMENTS:
            raise Corrupt(f"quant: {source.nbytes} bytes are no segment", operation="load")
        *codes, group, length = HEADER.unpack_from(source)
        body = source[HEADER.size :]
        if codes == [0, 0] and length == body.nbytes == into.nbytes:
            into[:] = body
            return
        sizes = self._sizes(spec, codes, group)
        if not sizes or sum(sizes) != length or length != body.nbytes:
            raise Corrupt(
                f"quant: {source.nbytes} bytes are no {into.nbytes} encoded", operation="load"
            )
        shape, step, at = _shape(spec, group), into.nbytes // len(sizes), 0
        for plane, (code, size) in enumerate(zip(codes, sizes, strict=False)):
            target = into[plane * step : plane * step + step]
            self._decode(code, ELEMENTS[spec.dtype], body[at : at + size], target, *shape)
            at += size

    @staticmethod
    def _sizes(spec: KVSpec, codes: object, group: int) -> list[int]:
        """Encoded bytes of each plane; none when the codes are not for this form."""
        tokens, heads, dim, _ = _shape(spec, group)
        item = 4 if spec.dtype == "float32" else 2
        whole = spec.planes in (1, 2) and tokens * heads * dim * item * spec.planes == spec.nbytes
        if not whole or not group:
            return []
        try:
            listed = [PlaneCode(code) for code in codes][: spec.planes]  # type: ignore[attr-defined]
            return [reference.nbytes(code, tokens, heads, dim, group) for code in listed]
        except ValueError:
            return []


def _shape(spec: KVSpec, group: int) -> tuple[int, int, int, int]:
    segment = spec.segments[0]
    return spec.tokens, segment.head_end - segment.head_begin, spec.head_dim, group
