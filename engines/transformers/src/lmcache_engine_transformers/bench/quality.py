"""What a language model says on top of key/value memory that an encoding changed.

Teacher forcing: the memory of a context is replaced, then the next tokens are read; the model's
distributions are compared with those on the exact memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_core.spi import ConfigError
from lmcache_engine_transformers.dropped import without_dropped
from lmcache_engine_transformers.space import cache_argument


@dataclass(frozen=True, slots=True)
class Quality:
    """Means per token.

    Attributes:
        nll: change of the negative log-likelihood of the text, in nats.
        kl: divergence of the distributions from the exact ones, in nats.
        top1: share of tokens whose most likely successor is the same.
    """

    nll: float
    kl: float
    top1: float


class Subject:
    """A model, one text, and the memory of its context in bfloat16.

    Attributes:
        kv: ``[layer][plane][token][head][dim]``, bfloat16; made by the model in float32.
    """

    def __init__(self, model: Any, ids: Sequence[int], context: int, /) -> None:
        import torch

        self._model = model
        self._context = torch.tensor([list(ids[:context])])
        self._next = torch.tensor([list(ids[context:])])
        with torch.inference_mode():
            out = model(self._context, use_cache=True, logits_to_keep=1)
        cache = getattr(out, cache_argument(model))
        planes = [
            torch.stack([part[0].transpose(0, 1) for part in (layer.keys, layer.values)])
            for layer in cache.layers
            if layer.keys.shape == layer.values.shape and layer.keys.shape[2] == context
        ]
        if len(planes) != len(cache.layers):
            raise ConfigError(
                f"{type(model).__name__} keeps keys and values of other shapes than tokens x heads"
            )
        self.kv = torch.stack(planes).to(torch.bfloat16)
        self._exact = self._logits(self.kv)

    def judge(self, kv: Any, /) -> Quality:
        """Compare with the exact memory."""
        exact, found, wanted = self._exact, self._logits(kv), self._next[0, 1:]
        rows = range(len(wanted))
        nll = float((exact[rows, wanted] - found[rows, wanted]).mean())
        kl = float((exact.exp() * (exact - found)).sum(-1).mean())
        top1 = float((exact.argmax(-1) == found.argmax(-1)).float().mean())
        return Quality(nll, kl, top1)

    def _logits(self, kv: Any) -> Any:
        """Log-probabilities of each successor in the text behind the context."""
        import torch
        from transformers import DynamicCache

        cache = DynamicCache()
        for number, layer in enumerate(kv.to(torch.float32)):
            keys, values = (plane.transpose(0, 1)[None].contiguous() for plane in layer)
            cache.update(keys, values, number)
        cache = without_dropped(cache, alone=True)
        with torch.inference_mode():
            past = {cache_argument(self._model): cache}
            out = self._model(self._next[:, :-1], use_cache=True, **past)
        return torch.log_softmax(out.logits[0].float(), -1)


def default_text() -> str:
    """The language reference that comes with Python."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))
