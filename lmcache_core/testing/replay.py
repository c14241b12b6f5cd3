"""Replay of prefix traces against a policy, as the index of a tier would use it."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from lmcache_core.spi.policy import EvictionPolicy

Requests = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Replayed:
    """Outcome of one replay.

    Attributes:
        asked: blocks asked for.
        hits: blocks in unbroken runs from the front.
        calls: slots touched, inserted and removed.
    """

    asked: int
    hits: int
    calls: int

    @property
    def rate(self) -> float:
        """Share of blocks that were hits."""
        return self.hits / self.asked if self.asked else 0.0


def read_trace(path: Path) -> list[list[int]]:
    """Block ids of each request of a Mooncake trace (gzip, JSON lines)."""
    with gzip.open(path) as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def distinct(requests: Requests) -> int:
    """Blocks an endless cache would hold."""
    return len({block for request in requests for block in request})


def replay(
    policy: EvictionPolicy,
    requests: Requests,
    capacity: int,
    *,
    hints: Sequence[Sequence[int]] | None = None,
) -> Replayed:
    """Drive a policy: touch what is there leaf to root, insert the rest root to leaf, touch all.

    Args:
        policy: made for ``capacity``.
        capacity: in blocks.
        hints: per request the blocks said to return, given after the request was served.
    """
    slots: dict[int, int] = {}
    blocks: list[int] = []  # by slot
    free: list[int] = []
    asked = hits = calls = 0
    busy = never_busy
    for number, request in enumerate(requests):
        asked += len(request)
        hits += sum(1 for _ in takewhile(slots.__contains__, request))
        held = [slots[block] for block in reversed(request) if block in slots]
        missing = [block for block in request if block not in slots]
        policy.touch(held)
        calls += len(held)
        for block in missing:
            fingerprint = fingerprint_of(block)
            if block in slots or not policy.admit(fingerprint, 1):
                continue
            while len(slots) >= capacity:
                slot = policy.victim(busy)
                assert slot is not None, "no victim although nothing is busy"
                policy.remove(slot, evicted=True)
                del slots[blocks[slot]]
                free.append(slot)
                calls += 1
            if free:
                slot = free.pop()
                blocks[slot] = block
            else:
                slot = len(blocks)
                blocks.append(block)
            slots[block] = slot
            policy.insert(slot, fingerprint, 1, 1.0)
            calls += 1
        if missing:
            held = [slots[block] for block in reversed(request) if block in slots]
            policy.touch(held)
            calls += len(held)
        if hints is not None:
            policy.hint([slots[b] for b in reversed(hints[number]) if b in slots])
    return Replayed(asked, hits, calls)


def oracle_hints(
    requests: Requests, *, right: float = 1.0, seed: int = 0, spare: int = 1
) -> list[list[int]]:
    """Per request all its blocks when it is said to return, else none.

    A request returns when a later one begins with it, the last ``spare`` (partial) blocks aside.

    Args:
        right: probability that the one bit of a request is true to the future.
    """
    rng = random.Random(seed)
    later: set[int] = set()
    hints: list[list[int]] = []
    for request in reversed(requests):
        returns = later.issuperset(request[: max(1, len(request) - spare)])
        hints.append(list(request) if returns is (rng.random() < right) else [])
        later.update(request)
    return hints[::-1]


def fingerprint_of(block: int) -> int:
    """64 well-mixed bits for a small number (the finaliser of splitmix64)."""
    mixed = (block + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return mixed ^ mixed >> 31


def never_busy(slot: int, /) -> bool:
    """Of policies that nobody else uses."""
    return False
