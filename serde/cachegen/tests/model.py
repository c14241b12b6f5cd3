"""Tables of a model that nobody trained: mixed channels with means, keys turned by their positions."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from lmcache_serde_cachegen import CacheGen, CacheGenOptions, Klt, KltOptions
from lmcache_serde_cachegen.calibrate import turned
from numpy.typing import NDArray

from lmcache_core.spi import Interior, Key, KVSpec, SegmentSpec, ValueInfo

LAYERS, HEADS, DIM, TOKENS = 2, 2, 32, 90
FREQUENCIES = 1e4 ** -(np.arange(0, DIM, 2) / DIM)
CODECS: dict[str, tuple[Any, Any]] = {
    "klt": (Klt, KltOptions), "cachegen": (CacheGen, CacheGenOptions),
}  # fmt: skip


def memory(seed: int, *, tokens: int = TOKENS, first: int = 0) -> NDArray[Any]:
    """Keys and values ``[layer][plane][token][head][dim]`` of tokens at these positions."""
    model, draw = np.random.default_rng(5), np.random.default_rng(seed)
    mix = model.standard_normal((LAYERS, 2, HEADS, DIM, DIM)) * np.linspace(0.5, 0.05, DIM)[:, None]
    mean = 2 * model.standard_normal((LAYERS, 2, 1, HEADS, DIM))
    kv = np.einsum("lpthi,lphij->lpthj", draw.standard_normal((LAYERS, 2, tokens, HEADS, DIM)), mix)
    kv = (kv + mean).astype(np.float32)
    for layer in range(LAYERS):
        whole = np.zeros((first + tokens, HEADS, DIM), np.float32)
        whole[first:] = kv[layer, 0]
        kv[layer, 0] = turned(whole, FREQUENCIES, False, 1)[first:]
    return kv


@cache
def tables() -> bytes:
    draw = np.random.default_rng(3)
    samples = [
        (kv, draw.standard_normal(kv.shape).astype(np.float32))
        for kv in (memory(seed, tokens=240) for seed in range(3))
    ]
    return Klt.calibrate(samples, [FREQUENCIES], model="nobody's")


def tables_in(folder: Path) -> str:
    path = folder / "nobody.tables"
    path.write_bytes(tables())
    return str(path)


def serde(name: str, path: str, **options: Any) -> Any:
    kind, config = CODECS[name]
    return kind(config(tables=path, **options))


def bfloat16(values: NDArray[Any]) -> bytes:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).reshape(-1)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()


def floats(data: bytes | bytearray) -> NDArray[Any]:
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)


def spec_of(*, tokens: int = TOKENS, layer: int = 0, heads: tuple[int, int] = (0, HEADS)) -> KVSpec:
    segment = SegmentSpec(layer, *heads, 4 * tokens * (heads[1] - heads[0]) * DIM)
    return KVSpec("bfloat16", tokens, 2, HEADS, DIM, Interior.ROWS, (segment,))


def info_of(spec: KVSpec, first: int = 0) -> ValueInfo:
    return ValueInfo(Key(bytes(32), bytes(32)), spec, first)


def coded(codec: Any, info: ValueInfo, payload: bytes) -> bytes:
    into = bytearray(codec.bound(info.spec))
    return bytes(into[: codec.encode(info, memoryview(payload), memoryview(into))])


def restored(codec: Any, info: ValueInfo, data: bytes) -> bytes:
    back = bytearray(info.spec.nbytes)
    codec.decode(info, memoryview(data), memoryview(back))
    return bytes(back)
