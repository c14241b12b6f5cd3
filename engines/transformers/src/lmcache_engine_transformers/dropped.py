"""Prefixes that lost tokens on their way: the others keep their positions, and nothing attends to the lost ones.

The serde ``drop`` leaves a row of zeros in keys and values where it dropped a token, in each layer other tokens
and in all layers as many. Such rows are taken out of the cache that a model continues from. A layer then holds fewer
rows than it counts tokens: rotated keys carry their positions, new tokens get theirs from the count, and the mask
sees the rows as the last ones before the new tokens, so that each of these attends to all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lmcache_core.spi import ConfigError
from lmcache_engine_transformers.space import Planes


class Sparse(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers has no types there
    """Keys and values of some tokens of a prefix, and of all behind it.

    Args:
        stay: which tokens of the prefix are there, ``[tokens]``.
    """

    keys: Any
    values: Any

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, stay: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys[:, :, stay], values[:, :, stay]
        self.stay = stay
        self.dropped = int((~stay).sum())

    def get_seq_length(self) -> int:
        return int(self.keys.shape[-2]) + self.dropped

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return int(self.keys.shape[-2]) + query_length, self.dropped

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of all tokens, zeros where one was dropped."""
        places = torch.ones(self.get_seq_length(), dtype=torch.bool, device=self.keys.device)
        places[: len(self.stay)] = self.stay
        found = []
        for rows in (self.keys, self.values):
            made = rows.new_zeros((*rows.shape[:2], len(places), rows.shape[3]))
            made[:, :, places] = rows
            found.append(made)
        return found[0], found[1]


def rows_of(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer, a row for every token."""
    return layer.whole() if isinstance(layer, Sparse) else (layer.keys, layer.values)


def without_dropped(past: Any, *, alone: bool) -> Any:
    """The cache of one prompt without its rows of zeros.

    Cut before the first of them where the prompt is not ``alone`` (rows of a batch line up by position) or where
    layers lost different numbers of tokens.
    """
    stays = [
        (layer.keys != 0).any(3).any(1)[0] | (layer.values != 0).any(3).any(1)[0]
        for layer in past.layers
    ]
    common = torch.stack(stays).all(0)
    if bool(common.all()):
        return past
    if alone and len({int(stay.sum()) for stay in stays}) == 1:
        for index, (layer, stay) in enumerate(zip(past.layers, stays, strict=True)):
            past.layers[index] = Sparse(layer.keys, layer.values, stay)
        return past
    good = int(common.int().argmin())
    for layer in past.layers:
        layer.keys, layer.values = layer.keys[:, :, :good], layer.values[:, :, :good]
    return past if good else DynamicCache()


def drops(fidelity: str) -> bool:
    """Whether a cache of this fidelity may give back prefixes that lost tokens."""
    names = fidelity.removeprefix("approx:").split("+")
    return any(name.startswith("drop") for name in names)


def refuse_unfit(model: PreTrainedModel, layout: tuple[Planes, ...]) -> None:
    """Say why a model cannot continue from some of its tokens.

    Raises:
        ConfigError: it cannot.
    """
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    if any(isinstance(layer, DynamicSlidingWindowLayer) for layer in layers):
        raise ConfigError(
            f"serde 'drop' is not for {name}: a window counts rows, and dropped tokens leave none; use quant"
        )
    if len(layout) != 1:
        raise ConfigError(
            f"serde 'drop' is not for {name}: its layers have {len(layout)} shapes and are stored "
            "apart, so they could lose different tokens; use quant"
        )
