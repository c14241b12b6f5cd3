"""Which tokens ``drop`` keeps, against chance and against the latest ones of each chunk alone, on three texts.

    python benchmarks/dropping.py [--keep 0.5] [--context 1536] [--following 512] [--model FOLDER]

Each choice keeps as many tokens, in each layer its own, the first four of the prompt and the latest of each chunk among
them. Printed is the divergence of the model's predictions in nats per token (``lmcache bench serde``). Exit status
1: in the mean the serde's choice is no better than one of the other two.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from lmcache_engine_transformers.bench.command import measured, slices
from lmcache_engine_transformers.bench.quality import Subject, default_text
from lmcache_engine_transformers.demo.model import home, load, prepare
from lmcache_serde_drop import Drop, DropOptions

from lmcache_core.spi import ValueInfo

Order = Callable[[Any, ValueInfo], Any]
CHUNK = 256


def chance(rows: Any, info: ValueInfo) -> Any:
    """The same for the same place."""
    place = b"%d of %r" % (info.spec.segments[0].layer, info.key.digest)
    seed = int.from_bytes(hashlib.sha256(place).digest()[:8])
    return np.random.default_rng(seed).random(rows.shape[1])


def latest(rows: Any, info: ValueInfo) -> Any:
    return -np.arange(rows.shape[1]) / rows.shape[1]


def long_values(rows: Any, info: ValueInfo) -> Any:
    """What moves most when it is attended to."""
    wide = (rows[1].astype(np.uint32) << 16).view(np.float32)
    return 1 / (1 + np.linalg.norm(wide, axis=1))


CHOICES: dict[str, Order | None] = {
    "unlike keys (the serde)": None,
    "chance": chance,
    "latest alone": latest,
    "long values": long_values,
}


def serde(order: Order | None, keep: float) -> Drop:
    made = Drop(DropOptions(keep=keep))
    if order is not None:
        made.order = order  # type: ignore[method-assign]
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=float, default=0.5)
    parser.add_argument("--context", type=int, default=1536)
    parser.add_argument("--following", type=int, default=512)
    parser.add_argument("--model", type=Path, help="default: that of the demo, fetched once")
    chosen = parser.parse_args()
    tokenizer, model = load(chosen.model or prepare(home(), print), "float32")
    ids = tokenizer(default_text()).input_ids
    found: dict[str, list[float]] = {name: [] for name in CHOICES}
    for part in slices(ids, 3, chosen.context + chosen.following):
        subject = Subject(model, part, chosen.context)
        for name, order in CHOICES.items():
            found[name].append(measured(subject, [serde(order, chosen.keep)], CHUNK)["kl"])
            print(f"text {len(found[name])}, {name}: KL {found[name][-1]:.4f}", flush=True)
    for name, each in found.items():
        print(f"{name:>24}: " + " ".join(f"{kl:.4f}" for kl in each) + f", mean {mean(each):.4f}")
    ours, *others = (mean(each) for each in list(found.values())[:3])
    return int(ours >= min(others))


if __name__ == "__main__":
    sys.exit(main())
