"""bfloat16 in eight bits: for each token and head one scale, for each element a step."""

from dataclasses import dataclass

import numpy as np

from lmcache_core.spi import Corrupt, KVSpec, TensorSerde, ValueInfo

LARGEST = 3.4e38 / 128
"""Scales from here on overflow: such values are declined, and no decoder makes an infinity."""


@dataclass(frozen=True, slots=True)
class Int8Options:
    """Options of ``int8-example``.

    Attributes:
        exact_tokens: so many tokens at the start of a prompt stay as they are.
    """

    exact_tokens: int = 4


class Int8(TensorSerde):
    """Encoded form: a bfloat16 scale for each row, then an int8 for each element."""

    config_type = Int8Options
    wire_id = "int8-example"
    lossless = False
    error_bound = "1/127 of the largest element of the same token and head"

    def __init__(self, config: Int8Options, /) -> None:
        self.exact_tokens = config.exact_tokens

    def bound(self, spec: KVSpec, /) -> int:
        return spec.nbytes // 2 + spec.nbytes // max(1, spec.head_dim)

    def encode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> int:
        if info.spec.dtype != "bfloat16":
            raise ValueError(f"int8-example is for bfloat16, not for {info.spec.dtype}")
        words = np.frombuffer(source, "<u2").reshape(-1, info.spec.head_dim)
        rows = (words.astype("<u4") << 16).view("<f4")
        largest = np.abs(rows).max(axis=1)
        if not (largest < 120 * LARGEST).all():
            raise ValueError("int8-example: not finite, or nearly so")
        # Rounded up, so that no step goes beyond 127; 1 where there is nothing to scale.
        scales = (((largest / 127).view("<u4") + 0xFFFF) >> 16).astype("<u2")
        scales[largest == 0] = 0x3F80
        steps = np.rint(rows / _wide(scales)[:, None]).clip(-127, 127).astype("i1")
        cut = scales.nbytes
        np.frombuffer(into, "<u2", len(scales))[:] = scales
        np.frombuffer(into, "i1", steps.size, cut)[:] = steps.ravel()
        return cut + steps.nbytes

    def decode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> None:
        count = into.nbytes // 2 // max(1, info.spec.head_dim)
        if source.nbytes != 2 * count + into.nbytes // 2 or info.spec.dtype != "bfloat16":
            raise Corrupt(f"int8-example: {source.nbytes} bytes for {into.nbytes}")
        scales = _wide(np.frombuffer(source, "<u2", count))
        if not (np.abs(scales) < LARGEST).all():
            raise Corrupt("int8-example: a scale that nobody wrote")
        steps = np.frombuffer(source, "i1", -1, 2 * count).reshape(count, -1)
        rows = (steps * scales[:, None]).view("<u4")
        # To the nearest bfloat16, ties to even.
        words = (rows + 0x7FFF + (rows >> 16 & 1)) >> 16
        np.frombuffer(into, "<u2")[:] = words.ravel().astype("<u2")


def _wide(words: "np.ndarray") -> "np.ndarray":
    """bfloat16 as float32."""
    return (words.astype("<u4") << 16).view("<f4")
