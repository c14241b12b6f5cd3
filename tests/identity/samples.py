"""Records and an independent second writing of the rules, shared by the identity tests."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

from lmcache_core.identity import EXACT, FORMAT, Adapter, Extra, Group, KeySpace, Rope
from lmcache_core.spi.layout import Interior, Reuse


def group(**changes: Any) -> Group:
    fields: dict[str, Any] = {
        "reuse": Reuse.ALL, "window": 0, "tokens_per_chunk": 16, "layers": (0, 1, 3), "heads": 8,
        "head_range": (0, 8), "head_dim": 64, "planes": 2, "dtype": "bfloat16", "interior": Interior.ROWS,
        "page_size": None, "encoding": None, "engine": None,
    }  # fmt: skip
    return Group(**fields | changes)


def pages(**changes: Any) -> Group:
    own: dict[str, Any] = {
        "interior": Interior.PAGE,
        "page_size": 16,
        "encoding": "cpu-attn-vnni",
        "engine": "vllm",
    }
    return group(**own | changes)


def rope(**changes: Any) -> Rope:
    fields: dict[str, Any] = {
        "layers": (), "kind": "yarn", "base": 500000.0, "rotary_dim": 64, "interleaved": False,
        "parameters": (("factor", 8.0), ("beta", (32.0, 1.0))),
    }  # fmt: skip
    return Rope(**fields | changes)


def space(**changes: Any) -> KeySpace:
    fields: dict[str, Any] = {
        "format": FORMAT, "model": "org/model", "weights": bytes(range(32)), "epoch": 0, "kv_dtype": "bfloat16",
        "scales": "none", "rope": (rope(),), "groups": (group(), pages(reuse=Reuse.WINDOW, window=128)),
        "adapter": Adapter(digest=b"a" * 32, scale=0.5), "tenant": "blue", "fidelity": EXACT,
        "tags_in_key": (("team", "red"),), "fields": (("manager.site", 7),),
    }  # fmt: skip
    return KeySpace(**fields | changes)


def plain_chain(root: bytes, ids: list[int], size: int, extras: list[Extra]) -> list[bytes]:
    """The chain written down naively; partial chunk last."""
    digests: list[bytes] = []
    for start in range(0, len(ids), size):
        chunk = ids[start : start + size]
        stop = start + size
        here = [
            e for e in extras
            if e.begin < min(stop, len(ids)) and (e.end > start or e.begin >= start)
        ]  # fmt: skip
        here.sort(key=lambda e: (e.begin, e.end, e.kind, e.digest))
        data = b"lmcache.chunk\x00" + (digests[-1] if digests else root)
        data += struct.pack(f"<I{len(chunk)}I", len(chunk), *chunk) + struct.pack("<I", len(here))
        for e in here:
            data += struct.pack("B", len(e.kind)) + e.kind.encode()
            data += struct.pack("B", len(e.digest)) + e.digest
            data += struct.pack("<qQ", e.begin - start, e.end - e.begin)
        digests.append(hashlib.sha256(data).digest())
    return digests
