"""Whether two computations of the same KV are the same, as far as arithmetic allows."""

from __future__ import annotations

TOLERANCE = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 1e-1}
"""Largest difference, as a part of the largest number; batches of other shapes round in another order."""


def close(ours: bytearray, theirs: memoryview, dtype: str) -> bool:
    """Compare two payloads of one type; what is no plain number is compared bit by bit."""
    if dtype not in TOLERANCE:
        return bytes(theirs) == bytes(ours)
    import torch  # here: vLLM brings it, and only the canary needs it

    kind = getattr(torch, dtype)
    a = torch.frombuffer(ours, dtype=kind).float()
    b = torch.frombuffer(bytearray(theirs), dtype=kind).float()
    return bool((a - b).abs().max() <= TOLERANCE[dtype] * b.abs().max())
