"""Damaged, cut and foreign values against every chain of first-party serdes that is installed.

    python tests/storage/damaged.py [--cases 1000000]

Half of the cases are frames as a tier gives them back: each is refused, or gives exactly the bytes that were stored.
The other half are the bytes of one segment without the digests around them: refused or some bytes, never anything
else, and nothing beside its own memory is written.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmcache_core import frame
from lmcache_core.registry import Registry
from lmcache_core.spi import Corrupt, Key, Load, Store, ValueInfo
from lmcache_core.testing.contexts import test_context
from lmcache_core.testing.serde import GUARD, bfloat16_noise, kv_spec
from lmcache_core.wrappers import Chain, recode
from lmcache_core.wrappers.coder import Coder

SPEC = kv_spec(tokens=16, heads=1, head_dim=32)
KEYS = [Key(b"s" * 32, bytes([n]) * 32) for n in range(2)]
MODES = (
    "int8", "int8c", "k8v4h", "int4", "int4h", "kivi4", "k4v4h", "int3h", "turbo4", "turbo3", "e4m3",
    "e5m2",
)  # fmt: skip
CHAINS: list[list[tuple[str, dict[str, Any]]]] = [
    [("x12", {})],
    [("xr", {})],
    [("zstd", {})],
    [("x12", {}), ("zstd", {})],
    *([("quant", {"mode": mode})] for mode in MODES),
    [("quant", {"mode": "k8v4h"}), ("zstd", {})],
]


def whole(key: Key) -> bytes:
    """A plain frame at the beginning of a prompt."""
    room = frame.header_nbytes(1)
    view = memoryview(bytearray(bytes(room) + bfloat16_noise(SPEC.nbytes, key.digest[0])))
    frame.seal_value(view[:room], view[room:], key, spec=SPEC, first=256)
    return bytes(view)


def coders(folder: Path) -> Iterator[tuple[str, Coder]]:
    """Every chain; encryption behind one of them where it is installed."""
    registry, context = Registry(), test_context()
    chains = [*CHAINS]
    if "encrypt" in registry.names("serdes"):
        keys = folder / "keys"
        keys.touch(0o600)
        keys.write_text("41" * 32 + "\n")
        chains.append([("quant", {"mode": "int8"}), ("encrypt", {"key_file": str(keys)})])
    for chain in chains:
        serdes = []
        for name, options in chain:
            found = registry.load("serdes", name)
            serdes.append(found(found.config_type(**options)))
        label = "+".join(options.get("mode", name) for name, options in chain)
        yield label, Coder(Chain(serdes=tuple(serdes)), context)


def damage(draw: random.Random, good: bytes, foreign: bytes) -> bytes:
    """One way in which a medium gives back something else."""
    kind = draw.randrange(8)
    front = draw.choice((len(good), 64, 4096))
    begin = min(len(good) - 1, 4096) if draw.random() < 0.5 else 0
    if kind < 4:
        bad = bytearray(good)
        for _ in range(1 + kind // 2 * 3):
            bad[draw.randrange(begin, len(bad)) % (front or 1)] ^= 1 << draw.randrange(8)
        return bytes(bad)
    if kind == 4:
        return good[: draw.randrange(len(good))]
    if kind == 5:
        at = draw.randrange(len(good))
        return good[:at] + draw.randbytes(16) + good[at + 16 :]
    if kind == 6:
        return foreign
    at = draw.randrange(len(good))
    return good[:at] + foreign[at:]


def frames(coder: Coder, cases: int, seed: int) -> int:
    """Whole values; how many were refused."""
    draw, key = random.Random(seed), KEYS[0]
    good, foreign = (
        bytes(coder.encode(Store(each, (memoryview(whole(each)),))).view) for each in KEYS
    )
    room = memoryview(bytearray(len(whole(key))))
    coder.decode(Load(key, (room,)), memoryview(good))
    wanted, refused = bytes(room), 0
    for _ in range(cases):
        bad = damage(draw, good, foreign)
        try:
            coder.decode(Load(key, (room,)), memoryview(bad))
        except Corrupt:
            refused += 1
        else:
            assert bytes(room) == wanted, "other bytes than those that were stored"
    return refused


def segments(coder: Coder, cases: int, seed: int) -> int:
    """One segment through the first serde of the chain; how many were refused."""
    draw, serde = random.Random(seed), coder.serdes[0]
    info = ValueInfo(KEYS[0], SPEC, 256)
    coded = []
    for n in range(2):
        into = bytearray(recode.bound(serde, SPEC, SPEC.nbytes))
        noise = memoryview(bfloat16_noise(SPEC.nbytes, n))
        coded.append(bytes(into[: recode.encode(serde, info, noise, memoryview(into))]))
    guarded, refused = bytearray(GUARD + bytes(SPEC.nbytes) + GUARD), 0
    into = memoryview(guarded)[len(GUARD) : -len(GUARD)]
    for _ in range(cases):
        try:
            recode.decode(serde, info, memoryview(damage(draw, *coded)), into)
        except Corrupt:
            refused += 1
    assert guarded[: len(GUARD)] == guarded[-len(GUARD) :] == GUARD, "wrote beside its memory"
    return refused


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000)
    cases = parser.parse_args().cases
    with tempfile.TemporaryDirectory() as folder:
        found = list(coders(Path(folder)))
        each = -(-cases // (2 * len(found)))
        for label, coder in found:
            began = time.monotonic()
            refused = frames(coder, each, 1), segments(coder, each, 2)
            seconds = time.monotonic() - began
            sys.stdout.write(
                f"{label:>12}: {2 * each} cases, refused {refused[0]} values and {refused[1]} segments,"
                f" {seconds:.0f} s\n"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
