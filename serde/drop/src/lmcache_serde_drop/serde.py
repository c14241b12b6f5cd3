"""``drop``: a bitmap of the tokens that stay, and their rows as they are."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_core.spi import Corrupt, KVSpec, TensorSerde, ValueInfo
from lmcache_serde_drop.config import DropOptions

HEADER = struct.Struct("<II")
"""Tokens, and tokens that stay."""
ITEMS: dict[str, Any] = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32}


class Drop(TensorSerde):
    """Rows of a share of the tokens, in each layer others; all heads of a layer drop the same tokens.

    The latest tokens of a chunk stay, and of the others those whose keys are least like the mean of the chunk: what
    queries turn to stands out (KeyDiff, arXiv 2504.15364, here for all heads of a layer at once; the idea of keeping
    sinks and what is most attended: StreamingLLM, arXiv 2309.17453, and H2O, arXiv 2306.14048). How many stay
    depends on nothing but options and the length of the chunk, so it is the same in all layers.

    A dropped token is a row of zeros in keys and values after ``decode``, and an engine must know it as such: it
    leaves the row out and lets the others keep their positions. What is encoded again loses the same tokens.
    """

    config_type = DropOptions
    wire_id = "drop"
    lossless = False
    drops_tokens = True
    error_bound = "none: dropped tokens are not seen any more"

    def __init__(self, config: DropOptions, /) -> None:
        self.config = config
        self.exact_tokens = config.exact_tokens

    def bound(self, spec: KVSpec, /) -> int:
        return HEADER.size + -(-spec.tokens // 8) + spec.nbytes

    def encode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> int:
        rows = _rows(info.spec, source)
        if rows is None:
            raise ValueError("drop needs keys and values of a token in one value")
        tokens = rows.shape[1]
        stay = self._stay(rows, info)
        bitmap = np.packbits(stay)
        kept = rows[:, stay]
        HEADER.pack_into(into, 0, tokens, kept.shape[1])
        at = HEADER.size + bitmap.nbytes
        into[HEADER.size : at] = bitmap.data
        into[at : at + kept.nbytes] = kept.tobytes()
        return at + kept.nbytes

    def decode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> None:
        target = _rows(info.spec, into)
        if target is None or source.nbytes < HEADER.size:
            raise Corrupt(f"drop: {source.nbytes} bytes are no segment", operation="load")
        tokens, count = HEADER.unpack_from(source)
        at = HEADER.size + -(-tokens // 8)
        row = target.shape[2] * target.itemsize
        if tokens != target.shape[1] or source.nbytes != at + target.shape[0] * count * row:
            raise Corrupt(f"drop: {source.nbytes} bytes are no {tokens} tokens", operation="load")
        bits = np.frombuffer(source[HEADER.size : at], np.uint8)
        stay = np.unpackbits(bits, count=tokens).astype(bool)
        if int(stay.sum()) != count or np.packbits(stay).tobytes() != bits.tobytes():
            raise Corrupt(f"drop: {count} tokens and another bitmap", operation="load")
        target[...] = 0
        kept = np.frombuffer(source[at:], target.dtype).reshape(2, count, target.shape[2])
        target[:, stay] = kept

    def order(self, rows: npt.NDArray[Any], info: ValueInfo, /) -> npt.NDArray[np.float64]:
        """A number for each token, -1 to 2, the lowest for those that stay first; not finite where rows are not.

        Args:
            rows: ``[2][token][head * dim]``, bfloat16 as 16-bit integers.
        """
        return _likeness(rows[0])

    def _stay(self, rows: npt.NDArray[Any], info: ValueInfo) -> npt.NDArray[np.bool_]:
        """Which tokens stay; the first of a prompt do so without this serde."""
        tokens = rows.shape[1]
        sinks = min(tokens, self.exact_tokens) if info.first_token <= 0 else 0
        count = min(tokens - sinks, max(self.config.recent, round(self.config.keep * tokens)))
        found = self.order(rows, info)
        if np.isnan(found).any():
            raise ValueError("drop: an element is not finite")
        found[tokens - min(self.config.recent, count) :] = -2
        first = np.argsort(found[sinks:], kind="stable") + sinks
        stay = np.zeros(tokens, bool)
        stay[first[:count]] = True
        return stay


def _likeness(keys: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Cosine of each token's keys, of all heads, with their mean; 2 for keys of zeros: dropped before."""
    if keys.dtype == np.uint16:  # bfloat16 is the upper half of a float32
        keys = (keys.astype(np.uint32) << 16).view(np.float32)
    wide = keys.astype(np.float64)
    mean = wide.mean(0)
    lengths = np.sqrt(np.einsum("td,td->t", wide, wide))
    with np.errstate(invalid="ignore", divide="ignore"):
        found: npt.NDArray[np.float64] = wide @ mean / (lengths * np.sqrt(mean @ mean) + 1e-30)
    found[lengths == 0] = 2
    return found


def _rows(spec: KVSpec, data: memoryview) -> npt.NDArray[Any] | None:
    """``[plane][token][head * dim]``; None of a form that is not keys beside values."""
    item = ITEMS.get(spec.dtype)
    width = spec.head_dim * (spec.segments[0].head_end - spec.segments[0].head_begin)
    whole = item is not None and spec.planes == 2 and width > 0
    if not whole or 2 * spec.tokens * width * np.dtype(item).itemsize != data.nbytes:
        return None
    return np.frombuffer(data, item).reshape(2, spec.tokens, width)
