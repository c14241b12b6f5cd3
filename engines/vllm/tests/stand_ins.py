"""Stand-ins for the records of vLLM that a connector reads."""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

BLOCK = 4
CHUNK = 8
WINDOW = 10
LAYERS = 2
CELL = 16
NAMES = itertools.count()


def next_token(tokens):
    return int.from_bytes(hashlib.blake2b(str(tokens).encode(), digest_size=2).digest()) % 50


class FullAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


@dataclass
class Request:
    """As much of vLLM's as is read."""

    request_id: str
    all_token_ids: list
    most: int
    cache_salt: str = ""
    kv_transfer_params: dict | None = None
    prompt_embeds: object = None
    mm_features: tuple = ()
    lora_request: object = None
    num_computed_tokens: int = 0
    state: str = "waiting"
    tables: list = field(default_factory=list)
    prompt: int = 0
    fill: int = 0  # tokens when it was asked about last
    flying: int = 0
    life: int = 0  # steps of an earlier one count no more
    placeholders: int = 0
    served: int | None = None
    before: str = ""

    def __post_init__(self):
        self.prompt = len(self.all_token_ids)
        self.whole = list(self.all_token_ids)
        while len(self.whole) < self.prompt + self.most:
            self.whole.append(next_token(self.whole))

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    @property
    def over(self):
        return self.num_tokens >= self.prompt + self.most


class Pool:
    """Blocks with reference counts and a prefix cache, least recently freed first."""

    def __init__(self, count):
        self.free = deque(range(1, count))  # block 0 is the null block
        self.refs = [0] * count
        self.names = {}
        self.by_name = {}

    def take(self, count):
        if count > len(self.free):
            return None
        found = [self.free.popleft() for _ in range(count)]
        for block in found:
            self.forget(block)
            self.refs[block] = 1
        return found

    def forget(self, block):
        name = self.names.pop(block, None)
        if name is not None and self.by_name.get(name) == block:
            del self.by_name[name]

    def touch(self, blocks):
        for block in blocks:
            if not self.refs[block]:
                self.free.remove(block)
            self.refs[block] += 1

    def give(self, blocks):
        for block in reversed(blocks):
            if block:
                self.refs[block] -= 1
                if not self.refs[block]:
                    self.free.append(block)

    def name(self, block, name):
        if block not in self.names and name not in self.by_name:
            self.names[block], self.by_name[name] = name, block

    def reset(self):
        self.names.clear()
        self.by_name.clear()


def config(
    daemon, *, rank=0, tensor=1, pipeline=1, mla=False, engine=None, model="m", role="kv_both", **extra
):  # fmt: skip
    """A stand-in for ``VllmConfig``."""
    known = {"lmcache.daemon.socket": daemon.path, "lmcache.chunk_size": CHUNK}
    transfer = SimpleNamespace(
        kv_connector_extra_config=known | {f"lmcache.{k}": v for k, v in extra.items()},
        engine_id=engine or f"engine-{next(NAMES)}",
        kv_role=role,
        is_kv_consumer=role in ("kv_both", "kv_consumer"),
        is_kv_producer=role in ("kv_both", "kv_producer"),
        kv_load_failure_policy="fail",
    )
    hf = SimpleNamespace(architectures=[model], name=model)
    return SimpleNamespace(
        kv_transfer_config=transfer,
        cache_config=SimpleNamespace(cache_dtype="auto", kv_offloading_size=None),
        parallel_config=SimpleNamespace(
            world_size=tensor * pipeline, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline,
            rank=rank,
        ),
        model_config=SimpleNamespace(
            hf_config=hf, dtype="float32", model="/none", max_model_len=4096, use_mla=mla,
            get_total_num_hidden_layers=lambda: LAYERS,
        ),
        load_config=SimpleNamespace(load_format="dummy"),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )  # fmt: skip


SPECS = {
    "full": lambda: FullAttentionSpec(block_size=BLOCK),
    "window": lambda: SlidingWindowSpec(block_size=BLOCK, sliding_window=WINDOW),
    "state": lambda: MambaSpec(block_size=BLOCK, mamba_cache_mode="align"),
}
"""What layers of a kind remember."""


def cache_config(blocks, kinds=("full",)):
    """A stand-in for ``KVCacheConfig``: the layers of all kinds take turns."""
    groups = []
    for number, kind in enumerate(kinds):
        names = [f"model.layers.{n * len(kinds) + number}.attn" for n in range(LAYERS)]
        groups.append(SimpleNamespace(kv_cache_spec=SPECS[kind](), layer_names=names))
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=blocks, kv_tp_replicas=1)
