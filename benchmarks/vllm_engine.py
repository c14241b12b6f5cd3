"""One vLLM engine measured with whatever connector: run by ``vllm_hits.py`` in the environment of that connector.

    PYTHON benchmarks/vllm_engine.py JOB

JOB is a JSON object, see ``Job``; the last line printed is ``RESULT`` and a JSON object. Imports only vLLM, so
that another connector's environment can run it. Times are until the first token, seen by the caller of the
engine; every pair is checked to have been served what it claims.
"""

from __future__ import annotations

import json
import os
import random
import struct
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

TAIL = 8
TOTAL = struct.Struct("dQ")


@dataclass
class Job:
    """What to measure.

    Attributes:
        pairs: hits in vLLM's own prefix cache and in the connector's, one after the other.
        cold: pairs of cold prompts, one kept and one not.
        decode: prompts that are decoded together, to see what the hooks cost a step.
    """

    model: str
    connector: dict[str, Any] | None
    prefix: int = 4096
    pairs: int = 40
    cold: int = 0
    decode: int = 0


@dataclass
class Measured:
    """Seconds."""

    cold: float = 0.0
    own: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    skipped: list[float] = field(default_factory=list)
    hooks: dict[str, float] = field(default_factory=dict)
    hook_calls: dict[str, int] = field(default_factory=dict)
    decode: float = 0.0


class Bench:
    """One engine and its random prompts."""

    def __init__(self, job: Job) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.job = job
        self.draw = random.Random(0)
        more = {"kv_transfer_config": KVTransferConfig(**job.connector)} if job.connector else {}
        self.llm = LLM(
            job.model, dtype="float32", enforce_eager=True, max_model_len=8192,
            max_num_batched_tokens=8192, disable_log_stats=False, seed=0, **more,
        )  # fmt: skip

    def ids(self, count: int) -> list[int]:
        return self.draw.choices(range(4, 2048), k=count)

    def first(self, prompt: list[int], **extra: Any) -> tuple[float, int]:
        """Seconds to the first token, and tokens served."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False, **extra)
        begun = time.perf_counter()
        (output,) = self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return time.perf_counter() - begun, output.num_cached_tokens or 0

    def run(self) -> Measured:
        found = Measured()
        self.first(self.ids(64))  # what the engine does only once
        prefix = self.ids(self.job.prefix)
        found.cold, _ = self.first(prefix + self.ids(TAIL))
        time.sleep(2)  # stores end, memory is touched
        self.pairs(prefix, found)
        self.cold_pairs(found)
        if self.job.decode:
            self.decode(found)
        return found

    def pairs(self, prefix: list[int], found: Measured) -> None:
        for lap in range(self.job.pairs + 3):
            own, served = self.first(prefix + self.ids(TAIL))
            if self.job.connector is None:
                assert served == len(prefix), served
                found.own += [own] if lap >= 3 else []
                continue
            assert self.llm.reset_prefix_cache()
            ours, found_there = self.first(prefix + self.ids(TAIL))
            if lap >= 3:
                assert served == found_there == len(prefix), (lap, served, found_there)
                found.own.append(own)
                found.ours.append(ours)

    def cold_pairs(self, found: Measured) -> None:
        """Fresh prompts in one engine, kept or not by a flag of the request, in changing order."""
        skip = {"extra_args": {"kv_transfer_params": {"lmcache.skip_save": True}}}
        for pair in range(self.job.cold):
            for kept in (pair % 2 == 0, pair % 2 != 0):
                seconds, served = self.first(self.ids(1024), **({} if kept else skip))
                assert served == 0
                (found.kept if kept else found.skipped).append(seconds)

    def decode(self, found: Measured) -> None:
        """Steps without loads: seconds in the hooks of each process while they ran."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=128, temperature=0, detokenize=False, ignore_eos=True)
        prompts = [{"prompt_token_ids": self.ids(128)} for _ in range(self.job.decode)]
        before, begun = hooks(), time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        found.decode = time.perf_counter() - begun
        for name, (seconds, calls) in hooks().items():
            found.hooks[name] = seconds - before[name][0]
            found.hook_calls[name] = calls - before[name][1]


def hooks() -> dict[str, tuple[float, int]]:
    """Totals of ``vllm_timed``, by process."""
    folder = os.environ.get("LMCACHE_BENCH_TIMES", "")
    found = {}
    for name in ("scheduler", "worker"):
        path = os.path.join(folder, name)
        if folder and os.path.exists(path):
            with open(path, "rb") as file:
                found[name] = TOTAL.unpack(file.read(TOTAL.size))
    return found


if __name__ == "__main__":
    bench = Bench(Job(**json.loads(sys.argv[1])))
    print("RESULT", json.dumps(asdict(bench.run())), flush=True)
    bench.llm.llm_engine.engine_core.shutdown()
