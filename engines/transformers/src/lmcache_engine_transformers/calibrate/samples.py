"""What a codec is calibrated on: a model's keys and values, and how much its predictions mind errors there."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from lmcache_engine_transformers.space import cache_argument, ropes

MODULES = (
    "argparse", "ast", "asyncio", "calendar", "collections", "configparser", "csv", "datetime", "decimal",
    "difflib", "doctest", "email.message", "fractions", "gettext", "heapq", "http.client", "http.server",
    "imaplib", "inspect", "itertools", "json", "locale", "logging", "mailbox", "optparse", "os", "pathlib",
    "pickletools", "random", "re", "sched", "shutil", "smtplib", "socket", "sqlite3", "ssl", "statistics",
    "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "tokenize", "trace",
    "traceback", "unittest", "urllib.request", "weakref", "zipfile",
)  # fmt: skip
SHORT = 200
"""Characters of a description that is too short to read like a text."""


def library_text() -> str:
    """What Python's library says about itself: another source than the bench's text, the language reference."""
    return "\n\n".join(text for name in MODULES for text in _descriptions(name))


def _descriptions(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    yield inspect.getdoc(module) or ""
    for _, found in sorted(vars(module).items()):
        if getattr(found, "__module__", None) != name:
            continue
        for each in (found, *(vars(found).values() if inspect.isclass(found) else ())):
            text = getattr(each, "__doc__", None)
            if isinstance(text, str) and len(text) > SHORT:
                yield inspect.cleandoc(text)


def spread(ids: Sequence[int], count: int, length: int, /) -> list[Sequence[int]]:
    """So many parts of a text, evenly spread, as far as they fit without overlapping."""
    count = min(count, len(ids) // length)
    step = (len(ids) - length) / max(1, count - 1)
    return [ids[round(n * step) : round(n * step) + length] for n in range(count)]


def sample(model: Any, ids: Sequence[int], context: int, /, *, seed: int) -> tuple[Any, Any]:
    """Keys and values of a context, and the slope of the log likelihood of what the model would say behind it.

    The tokens behind are read as they are written; at each the model draws one of its own. The mean of the
    products of slopes is then the Fisher information, which says what an error costs.

    Returns:
        Two numpy arrays, float32 ``[layer][plane][token][head][dim]``.
    """
    import numpy as np
    import torch
    from transformers import DynamicCache

    with torch.no_grad():
        out = model(torch.tensor([list(ids[:context])]), use_cache=True, logits_to_keep=1)
    found = [(layer.keys, layer.values) for layer in getattr(out, cache_argument(model)).layers]
    leaves = [
        [plane.to(torch.bfloat16).float().requires_grad_() for plane in planes] for planes in found
    ]
    cache = DynamicCache()
    for number, (keys, values) in enumerate(leaves):
        cache.update(keys, values, number)
    following = torch.tensor([list(ids[context:])])
    logits = model(following, use_cache=True, **{cache_argument(model): cache}).logits[0].float()
    likelihood = torch.log_softmax(logits, -1)
    draw = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(likelihood.detach().exp(), 1, generator=draw)
    likelihood.gather(1, drawn).sum().backward()  # type: ignore[no-untyped-call]  # of torch

    def stacked(tensors: Sequence[Sequence[Any]]) -> Any:
        return np.stack(
            [np.stack([each[0].transpose(0, 1).numpy() for each in pair]) for pair in tensors]
        )

    slopes = [[plane.grad for plane in planes] for planes in leaves]
    return stacked([[plane.detach() for plane in planes] for planes in leaves]), stacked(slopes)


def frequencies(model: Any, /) -> list[Any]:
    """Angles per position of the model's rotary embeddings, each once."""
    import numpy as np

    found: set[Any] = {dict(rope.parameters)["inv_freq"] for rope in ropes(model)}
    return [np.array(each) for each in sorted(found)]
