"""``model.generate`` that computes only what the cache does not have."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from lmcache_core.engine import Cache, CacheEngine, Forms, Paged, Request
from lmcache_core.engine.quality import model_id
from lmcache_core.identity import KeySpace, Unkeyable
from lmcache_core.spi import GPUConnector, PageSpec, page_spec
from lmcache_engine_transformers.dropped import drops, refuse_unfit, rows_of, without_dropped
from lmcache_engine_transformers.registering import register
from lmcache_engine_transformers.space import (
    CACHE,
    Planes,
    Weights,
    cache_argument,
    key_space,
    probe_layout,
    versions,
)
from lmcache_engine_transformers.timing import Own, Stopwatch

UNKEYABLE = ("adapter_names", "token_type_ids", "position_ids")
"""Arguments that shape the KV in a way no key names; tensors are, whatever their name."""


@dataclass(frozen=True, slots=True)
class Reused:
    """What the last ``generate`` took from the cache, one entry per prompt.

    Attributes:
        prompt: prompt tokens.
        reused: of them, taken from the cache.
        stored: tokens newly kept.
        first_token: seconds from the call to the scores of the first new token.
        own: seconds spent in the cache's own code, copies included, of the whole call.
        cpu: the CPU's share of them, in the calling thread.
    """

    prompt: tuple[int, ...]
    reused: tuple[int, ...]
    stored: tuple[int, ...]
    first_token: float = 0.0
    own: float = 0.0
    cpu: float = 0.0


class CachedModel:
    """A causal language model of transformers with a prefix cache in front of it.

    Greedy output is the model's own, token for token (in float32; lower precisions have ties).
    Everything but ``generate`` goes to the model itself. Weights changed in place are noticed, except
    through ``.data``: call ``refresh`` then.

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
        self.model: Any = model
        self.cache = cache
        self.last = Reused((), (), ())
        self._tenant = tenant
        self._tags = tuple(tags)
        self._layout = probe_layout(model)
        if cache.fidelity != "exact":
            path = model.name_or_path  # empty: made here; "" would be the folder we are in
            cache.admit(model_id(path) if path else type(model).__name__)
        self._drops = drops(cache.fidelity)
        if self._drops:
            refuse_unfit(model, self._layout)
        self._argument = cache_argument(model)
        self._numbers = itertools.count()
        self._weights = Weights()
        self._versions: Any = None
        self._engine: CacheEngine | None = None
        self._session: object = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @property
    def space(self) -> KeySpace:
        """Key space of the model as it is now: changed weights or adapters are another one."""
        return self._current().forms.space

    def refresh(self) -> None:
        """Look at all weights again before the next call."""
        self._engine, self._weights = None, Weights()

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

        A call with input the key does not name (pictures, own positions, adapters by row), or in training
        mode, runs without the cache and is counted.

        Args:
            input_ids: [batch, tokens], left-padded where lengths differ.
            attention_mask: [batch, tokens], zeros for padding; None is what ``model.generate`` takes it for.
            skip_load, skip_save: leave the cache alone in one direction.
            options: passed on.

        Raises:
            ValueError: right padding, an own cache, or ``inputs_embeds``.
        """
        began, watch, own = time.perf_counter(), Stopwatch(), Own()
        for refused in ("past_key_values", "cache", "inputs_embeds"):
            if options.get(refused) is not None:
                raise ValueError(f"generate of a cached model takes no {refused}")
        how = options.get("generation_config") or self.model.generation_config
        if attention_mask is None:
            attention_mask = _inferred_mask(input_ids, options, how)
        prompts = _prompts(input_ids, attention_mask)
        options["logits_processor"] = [*(options.get("logits_processor") or ()), watch]
        try:
            requests = self._requests(prompts, options, skip_load, skip_save)
        except Unkeyable:
            output = self.model.generate(input_ids, attention_mask=attention_mask, **options)
            none = (0,) * len(prompts)
            first = (watch.first or began) - began
            self.last = Reused(tuple(map(len, prompts)), none, none, first)
            return output
        try:
            past, reused = self._past(requests, prompts, input_ids, own)
            beams = options.get("num_beams") or how.num_beams or 1
            copies = max(
                beams, options.get("num_return_sequences") or how.num_return_sequences or 1
            )
            if past.get_seq_length() and copies > 1:
                past.batch_repeat_interleave(copies)
            asked, computing = time.perf_counter(), own.computing
            with own.model():
                output = self.model.generate(
                    input_ids, attention_mask=attention_mask, **{CACHE: past}, **options
                )
            first = watch.first or time.perf_counter()
            self.cache.storage.report_prefill(
                sum(map(len, prompts)) - sum(reused), computing + first - asked
            )
            stored = self._store(requests, prompts, past, copies, output, input_ids)
            lengths = tuple(map(len, prompts))
            self.last = Reused(lengths, tuple(reused), tuple(stored), first - began, *own.spent())
            return output
        finally:
            for request in requests:
                request.end()

    def _requests(
        self,
        prompts: Sequence[list[int]],
        options: dict[str, Any],
        skip_load: bool,
        skip_save: bool,
    ) -> list[Request]:
        """One request per prompt.

        Raises:
            Unkeyable: this call must run without the cache.
        """
        odd = [
            name
            for name, value in options.items()
            if isinstance(value, torch.Tensor) or (name in UNKEYABLE and value is not None)
        ]
        if odd or self.model.training:
            self.cache.metrics.add("lmcache_unkeyed_requests_total", len(prompts))
            raise Unkeyable(f"no key names {', '.join(odd) or 'training mode'}")
        engine = self._current()
        return [
            engine.request(
                f"generate-{next(self._numbers)}",
                prompt,
                tags=self._tags,
                skip_load=skip_load,
                skip_save=skip_save,
            )
            for prompt in prompts
        ]

    def _current(self) -> CacheEngine:
        seen = versions(self.model)
        if self._engine is None or seen != self._versions:
            space = key_space(
                self.model,
                self._layout,
                chunk_tokens=self.cache.config.engine.chunk_size,
                weights=self._weights,
                tenant=self._tenant,
                fidelity=self.cache.fidelity,
            )
            self._engine = self.cache.engine(Forms(space))
            self._versions, self._session = seen, None
        self._session = register(self.cache, self._engine.forms, self._session)
        return self._engine

    def _past(
        self,
        requests: Sequence[Request],
        prompts: Sequence[list[int]],
        input_ids: torch.Tensor,
        own: Own,
    ) -> tuple[DynamicCache, list[int]]:
        """Cache to start from, and tokens reused per prompt."""
        reach = [request.lookup() for request in requests]
        if not any(reach):
            return DynamicCache(), [0] * len(prompts)
        alone = len(prompts) == 1
        rows = [
            self._load(request, end, alone) for request, end in zip(requests, reach, strict=True)
        ]
        reused = [row.get_seq_length() for row in rows]
        if len(rows) == 1 or (len(set(reused)) == 1 and len({*map(len, prompts)}) == 1):
            return _joined(rows, reused[0]), reused
        # Prompts of different lengths: complete each alone, so that all of them lack only the last token.
        for row, prompt in zip(rows, prompts, strict=True):
            rest = prompt[row.get_seq_length() : -1]
            if rest:
                ids = torch.tensor([rest], device=input_ids.device)
                with own.model():
                    self.model(
                        input_ids=ids, use_cache=True, logits_to_keep=1, **{self._argument: row}
                    )
        return _joined(rows, input_ids.shape[1] - 1), reused

    def _load(self, request: Request, reach: int, alone: bool) -> Any:
        """Memory for one prompt's prefix, filled from the cache; shorter when chunks were not good."""
        past: Any = DynamicCache()
        if not reach:
            return past
        shapes: dict[int, dict[int, Planes]] = {}
        for planes in self._layout:
            for layer in planes.layers:
                for plane in planes.planes:
                    shapes.setdefault(layer, {})[plane] = planes
        for layer in sorted(shapes):
            keys, values = (
                torch.empty(
                    (1, p.heads, request.room, p.head_dim), dtype=p.dtype, device=self.model.device
                )
                for p in (shapes[layer][0], shapes[layer][1])
            )
            past.update(keys[:, :, :0], values[:, :, :0], layer)
            past.layers[layer].keys, past.layers[layer].values = keys, values
        connector = self._bind(past, 0)
        try:
            good = request.load(Paged(connector, [[0]] * len(self._layout)))
        finally:
            connector.close()
        if not good:
            return DynamicCache()
        for held in past.layers:
            held.keys, held.values = held.keys[:, :, :good], held.values[:, :, :good]
        return without_dropped(past, alone=alone) if self._drops else past

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

    def _bind(self, past: Any, row: int, pad: int = 0) -> GPUConnector:
        """Connector over one row of a cache, its first real token at position 0."""
        tensors: dict[str, torch.Tensor] = {}
        specs: list[PageSpec] = []
        for group, planes in enumerate(self._layout):
            for layer in planes.layers:
                rows = rows_of(past.layers[layer])
                for plane in planes.planes:
                    tensor = rows[plane][row, :, pad:]
                    tensors[f"{layer}.{plane}"] = tensor
                    specs.append(page_spec(tensor, "hnc", layer=layer, group=group, plane=plane))
        connector = self.cache.connector(str(next(iter(tensors.values())).device.type))
        connector.bind(tensors, specs)
        return connector


def _inferred_mask(input_ids: torch.Tensor, options: dict[str, Any], how: Any) -> torch.Tensor:
    """The mask ``model.generate`` makes itself: padding is masked unless it may end a text too."""
    pad = options.get("pad_token_id", how.pad_token_id)
    end = options.get("eos_token_id", how.eos_token_id)
    ends = end if isinstance(end, list) else [end]
    if pad is None or pad in ends:
        return torch.ones_like(input_ids)
    mask: torch.Tensor = (input_ids != pad).long()
    return mask


def _prompts(input_ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """Real tokens of each row."""
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention mask {tuple(mask.shape)} for ids {tuple(input_ids.shape)}")
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
