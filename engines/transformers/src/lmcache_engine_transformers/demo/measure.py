"""One process's part of the demo: questions in, answers and what they cost out.

Run as a module it reads a ``Job`` as JSON from standard input and writes its ``Phase``s to standard output.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lmcache_core.engine import Cache
from lmcache_core.observers import Sample
from lmcache_core.wire import records, replies
from lmcache_core.wire.client import DaemonClient
from lmcache_engine_transformers.cached import CachedModel
from lmcache_engine_transformers.demo.model import load
from lmcache_engine_transformers.timing import Stopwatch

TOKENS = 32
"""Length of every answer, at least and at most."""
WARM_UP = (
    "The quick brown fox jumps over the lazy dog, and then it does so once more, somewhat slower. "
)


@dataclass(frozen=True, slots=True)
class Job:
    """What to ask and how.

    Attributes:
        model: folder.
        settings: configuration of the cache.
        prompts: token ids of each.
    """

    model: str
    dtype: str
    settings: dict[str, Any]
    prompts: list[list[int]]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    Attributes:
        first_token, cpu: seconds to the first token, and CPU seconds of all threads.
        own: CPU seconds of the calling thread in the cache's own code, of the whole call.
        beside: CPU seconds of the cache's other threads meanwhile.
    """

    ids: list[int]
    first_token: float
    cpu: float
    reused: int = 0
    own: float = 0.0
    beside: float = 0.0


@dataclass(frozen=True, slots=True)
class Phase:
    """Answers under one condition, and where chunks were found: tier to chunks.

    ``denser``: bytes that went into encodings by those that came out.
    """

    answers: list[Answer]
    hits: dict[str, int] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    denser: float = 1.0


def ask(model: Any, prompt: Sequence[int], /, *, tokens: int = TOKENS) -> Answer:
    """The answer of a plain or cached model, greedily."""
    import torch

    watch, began, used, others = Stopwatch(), time.perf_counter(), time.process_time(), _others()
    ids = torch.tensor([list(prompt)], device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        logits_processor=[watch],
    )
    first = (watch.first or time.perf_counter()) - began
    answer = output[0, len(prompt) :].tolist()
    if isinstance(model, CachedModel):
        beside = sum(spent - others.get(ident, 0.0) for ident, spent in _others().items())
        return Answer(answer, first, watch.cpu - used, model.last.reused[0], model.last.cpu, beside)
    return Answer(answer, first, watch.cpu - used)


def _others() -> dict[int, float]:
    """CPU seconds so far of each of the cache's own threads; none where the system does not tell."""
    spent = {}
    for thread in threading.enumerate():
        if thread.name.startswith("lmcache"):
            with suppress(OSError):  # ended meanwhile, or not Linux
                told = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
                spent[thread.native_id or 0] = int(told.split()[0]) / 1e9
    return spent


def threads() -> int:
    """Threads the model computes with."""
    import torch

    return torch.get_num_threads()


def warm_up(tokenizer: Any, model: Any, /) -> None:
    """Pay once for what the first call of a process costs, on a text that fills no chunk."""
    ask(model, tokenizer(WARM_UP).input_ids, tokens=2)


def through(
    cache: Cache, model: Any, prompts: Sequence[Sequence[int]], /, *, tokens: int = TOKENS,
    step: Callable[[], None] = lambda: None,
) -> Phase:  # fmt: skip
    """Ask a cached model and tell what each tier contributed."""
    before = _found(cache)
    answers = []
    for prompt in prompts:
        answers.append(ask(model, prompt, tokens=tokens))
        step()
    hits = {tier: count - before.get(tier, 0) for tier, count in _found(cache).items()}
    cache.flush()
    raw, stored = (_coded(cache, side) for side in ("raw", "stored"))
    kept = {name: nbytes for name, nbytes, _ in cache.usage()}
    return Phase(answers, hits, kept, raw / stored if stored else 1.0)


def _coded(cache: Cache, side: str) -> float:
    """Bytes of values that were encoded: ``raw`` or as ``stored``."""
    found = _samples(cache, f"lmcache_tier_serde_{side}_bytes_total")
    return sum(each.value for each in found if dict(each.labels)["verb"] == "store")


def _found(cache: Cache) -> dict[str, int]:
    found = _samples(cache, "lmcache_tier_hit_chunks_total")
    return {dict(each.labels)["tier"]: int(each.value) for each in found}


def _samples(cache: Cache, name: str) -> list[Sample | replies.Sample]:
    """Values of one metric of whoever has the tiers."""
    told: Sequence[Sample | replies.Sample] = cache.metrics.snapshot()
    if isinstance(cache.storage, DaemonClient):
        told = cache.storage.ask(replies.Metered, records.Stats).samples
    return [each for each in told if each.name == name]


def run(job: Job, /) -> list[Phase]:
    """Everything in a process that starts with an empty memory: from the lower tier, then from memory."""
    tokenizer, plain = load(Path(job.model), job.dtype)
    with Cache.from_config(job.settings) as cache:
        model = CachedModel(plain, cache)
        warm_up(tokenizer, model)
        return [through(cache, model, job.prompts) for _ in range(2)]


if __name__ == "__main__":
    json.dump([asdict(phase) for phase in run(Job(**json.load(sys.stdin)))], sys.stdout)
