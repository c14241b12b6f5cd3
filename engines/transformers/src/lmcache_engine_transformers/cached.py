"""``model.generate`` that computes only what the cache does not have."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from lmcache_core.engine import Cache, CacheEngine, Forms, Paged, Request
from lmcache_core.identity import KeySpace
from lmcache_core.spi import GPUConnector, PageSpec, page_spec
from lmcache_engine_transformers.space import Planes, key_space, probe_layout, versions


@dataclass(frozen=True, slots=True)
class Reused:
    """What the last ``generate`` took from the cache, one entry per prompt.

    Attributes:
        prompt: prompt tokens.
        reused: of them, taken from the cache.
        stored: tokens newly kept.
    """

    prompt: tuple[int, ...]
    reused: tuple[int, ...]
    stored: tuple[int, ...]


class CachedModel:
    """A causal language model of transformers with a prefix cache in front of it.

    Greedy output is the model's own, token for token (in float32; lower precisions have ties).
    Everything but ``generate`` goes to the model itself.

    Args:
        model: decoder-only, on the CPU or an accelerator that a connector can reach.
        cache: from ``Cache.from_config``; stays open, belongs to the caller.
        tenant: salt; prompts of different tenants never share.
        tags: labels of everything stored, for later deletion.

    Raises:
        ConfigError: a model whose KV cannot be reused; says why.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: Cache,
        *,
        tenant: str = "",
        tags: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.cache = cache
        self.last = Reused((), (), ())
        self._tenant = tenant
        self._tags = tuple(tags)
        self._layout = probe_layout(model)
        self._numbers = itertools.count()
        self._versions: Any = None
        self._engine: CacheEngine | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @property
    def space(self) -> KeySpace:
        """Key space of the model as it is now: changed weights or adapters are another one."""
        return self._current().forms.space

    @torch.no_grad()
    def generate(
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        skip_load: bool = False,
        skip_save: bool = False,
        **options: Any,
    ) -> Any:
        """``model.generate`` with the known prefix of every prompt loaded instead of computed.

        Args:
            input_ids: [batch, tokens], left-padded where lengths differ.
            attention_mask: [batch, tokens], zeros for padding; None means no padding.
            skip_load, skip_save: leave the cache alone in one direction.
            options: passed on.

        Raises:
            ValueError: right padding, an own ``past_key_values``, or ``inputs_embeds``.
        """
        for refused in ("past_key_values", "inputs_embeds"):
            if options.get(refused) is not None:
                raise ValueError(f"generate of a cached model takes no {refused}")
        prompts = _prompts(input_ids, attention_mask)
        engine = self._current()
        requests = [
            engine.request(
                f"generate-{next(self._numbers)}",
                prompt,
                tags=self._tags,
                skip_load=skip_load,
                skip_save=skip_save,
            )
            for prompt in prompts
        ]
        try:
            past, reused = self._past(requests, prompts, input_ids, skip_load)
            beams = options.get("num_beams") or self.model.generation_config.num_beams or 1
            copies = max(beams, options.get("num_return_sequences") or 1)
            if past.get_seq_length() and copies > 1:
                past.batch_repeat_interleave(copies)
            output = self.model.generate(
                input_ids, attention_mask=attention_mask, past_key_values=past, **options
            )
            stored = self._store(requests, prompts, past, copies, output, input_ids)
            self.last = Reused(tuple(map(len, prompts)), tuple(reused), tuple(stored))
            return output
        finally:
            for request in requests:
                request.end()

    def _current(self) -> CacheEngine:
        seen = versions(self.model)
        if self._engine is None or seen != self._versions:
            space = key_space(
                self.model,
                self._layout,
                chunk_tokens=self.cache.config.engine.chunk_size,
                tenant=self._tenant,
                fidelity=self.cache.fidelity,
            )
            self._engine = self.cache.engine(Forms(space))
            self._versions = seen
        return self._engine

    def _past(
        self,
        requests: Sequence[Request],
        prompts: Sequence[list[int]],
        input_ids: torch.Tensor,
        skip_load: bool,
    ) -> tuple[DynamicCache, list[int]]:
        """Cache to start from, and tokens reused per prompt."""
        reach = [0 if skip_load else request.lookup() for request in requests]
        if not any(reach):
            return DynamicCache(), [0] * len(prompts)
        rows = [
            self._load(request, tokens) for request, tokens in zip(requests, reach, strict=True)
        ]
        reused = [row.get_seq_length() for row in rows]
        if len(rows) == 1 or (len(set(reused)) == 1 and len({*map(len, prompts)}) == 1):
            return _joined(rows, reused[0]), reused
        # Prompts of different lengths: complete each alone, so that all of them lack only the last token.
        for row, prompt in zip(rows, prompts, strict=True):
            rest = prompt[row.get_seq_length() : -1]
            if rest:
                ids = torch.tensor([rest], device=input_ids.device)
                self.model(input_ids=ids, past_key_values=row, use_cache=True, logits_to_keep=1)
        return _joined(rows, input_ids.shape[1] - 1), reused

    def _load(self, request: Request, tokens: int) -> DynamicCache:
        """Memory for one prompt's prefix, filled from the cache; shorter when chunks were not good."""
        past = DynamicCache()
        if not tokens:
            return past
        shapes: dict[int, dict[int, Planes]] = {}
        for planes in self._layout:
            for layer in planes.layers:
                for plane in (0, 1) if planes.plane is None else (planes.plane,):
                    shapes.setdefault(layer, {})[plane] = planes
        for layer in sorted(shapes):
            keys, values = (
                torch.empty((1, p.heads, tokens, p.head_dim), dtype=p.dtype)
                for p in (shapes[layer][0], shapes[layer][1])
            )
            past.update(keys, values, layer)
        connector = self._bind(past, 0)
        try:
            good = request.load(Paged(connector, [[0]] * len(self._layout)))
        finally:
            connector.close()
        return past if good == tokens else _cut(past, good)

    def _store(
        self,
        requests: Sequence[Request],
        prompts: Sequence[list[int]],
        past: DynamicCache,
        copies: int,
        output: Any,
        input_ids: torch.Tensor,
    ) -> list[int]:
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        stored = []
        for index, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
            row, width = index * copies, input_ids.shape[1]
            computed = min(len(prompt), past.get_seq_length() - (width - len(prompt)))
            if self.cache.config.engine.save_decode and copies == 1:
                generated = sequences[row, width : width + past.get_seq_length() - width].tolist()
                request.extend(generated)
                computed += len(generated)
            connector = self._bind(past, row, width - len(prompt))
            try:
                surface = Paged(connector, [[0]] * len(self._layout))
                stored.append(request.store(surface, computed).stored)
            finally:
                connector.close()
        return stored

    def _bind(self, past: DynamicCache, row: int, pad: int = 0) -> GPUConnector:
        """Connector over one row of a cache, its first real token at position 0."""
        tensors: dict[str, torch.Tensor] = {}
        specs: list[PageSpec] = []
        for group, planes in enumerate(self._layout):
            for layer in planes.layers:
                for plane in (0, 1) if planes.plane is None else (planes.plane,):
                    held = past.layers[layer]
                    whole = held.keys if plane == 0 else held.values
                    tensor = whole[row, :, pad:]
                    tensors[f"{layer}.{plane}"] = tensor
                    specs.append(page_spec(tensor, "hnc", layer=layer, group=group, plane=plane))
        connector = self.cache.connector(str(next(iter(tensors.values())).device.type))
        connector.bind(tensors, specs)
        return connector


def _prompts(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    """Real tokens of each row."""
    if mask is None:
        return [[int(token) for token in row] for row in input_ids.tolist()]
    if bool((mask.diff(dim=1) < 0).any()) or not bool(mask[:, -1].all()):
        raise ValueError("prompts of a batch must be padded on the left (padding_side='left')")
    return [row[keep.bool()].tolist() for row, keep in zip(input_ids, mask, strict=True)]


def _joined(rows: Sequence[DynamicCache], length: int) -> DynamicCache:
    """One cache of a batch, every row padded on the left to ``length`` tokens."""
    if len(rows) == 1:
        return rows[0]
    joined = DynamicCache()
    filled = [(number, row) for number, row in enumerate(rows) if row.get_seq_length()]
    for index in range(len(filled[0][1].layers) if filled else 0):
        planes = []
        for name in ("keys", "values"):
            like = getattr(filled[0][1].layers[index], name)
            whole = like.new_zeros((len(rows), like.shape[1], length, like.shape[3]))
            for number, row in filled:
                part = getattr(row.layers[index], name)
                whole[number, :, length - part.shape[2] :] = part[0]
            planes.append(whole)
        joined.update(planes[0], planes[1], index)
    return joined


def _cut(past: DynamicCache, tokens: int) -> DynamicCache:
    """The first ``tokens`` tokens; an empty cache for none."""
    short = DynamicCache()
    if tokens:
        for index, layer in enumerate(past.layers):
            short.update(layer.keys[:, :, :tokens], layer.values[:, :, :tokens], index)
    return short
