"""Options of ``quant``."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import IntEnum

from lmcache_core.spi import ConfigError


class PlaneCode(IntEnum):
    """How one plane (keys or values) is coded; the numbers stand in encoded segments."""

    INT8_ROW = 1
    INT8_CHANNEL = 2
    INT4_ROW = 3
    INT4_HADAMARD = 4
    INT4_CHANNEL = 5
    INT3_HADAMARD = 6
    NORMAL4 = 7
    NORMAL3 = 8
    E4M3 = 9
    E5M2 = 10


MODES = {
    "int8": (PlaneCode.INT8_ROW, PlaneCode.INT8_ROW),
    "int8c": (PlaneCode.INT8_CHANNEL, PlaneCode.INT8_ROW),
    "k8v4h": (PlaneCode.INT8_CHANNEL, PlaneCode.INT4_HADAMARD),
    "int4": (PlaneCode.INT4_ROW, PlaneCode.INT4_ROW),
    "int4h": (PlaneCode.INT4_HADAMARD, PlaneCode.INT4_HADAMARD),
    "kivi4": (PlaneCode.INT4_CHANNEL, PlaneCode.INT4_ROW),
    "k4v4h": (PlaneCode.INT4_CHANNEL, PlaneCode.INT4_HADAMARD),
    "int3h": (PlaneCode.INT3_HADAMARD, PlaneCode.INT3_HADAMARD),
    "turbo4": (PlaneCode.NORMAL4, PlaneCode.NORMAL4),
    "turbo3": (PlaneCode.NORMAL3, PlaneCode.NORMAL3),
    "e4m3": (PlaneCode.E4M3, PlaneCode.E4M3),
    "e5m2": (PlaneCode.E5M2, PlaneCode.E5M2),
}
"""Codes of keys and of values."""


@dataclass(frozen=True, slots=True)
class QuantOptions:
    """Options of ``quant``.

    Attributes:
        mode: ``int8`` (per token and head), ``int8c`` (keys per channel), ``k8v4h`` (keys of 8 bits per
            channel, values of 4 after a Hadamard transform), ``int4``, ``int4h`` (after the transform),
            ``kivi4`` (keys per channel, values per token), ``k4v4h`` (keys per channel, values after the
            transform), ``int3h``, ``turbo4``, ``turbo3`` (after the transform, in levels of a normal
            distribution), ``e4m3``, ``e5m2`` (8-bit floats, a scale per head).
        group: tokens that share the scale of a channel in the modes with keys per channel; 0 takes 256 for
            8 bits and 64 for 4.
        exact_layers: transformer layers that are kept as they are.
        exact_tokens: first tokens of a prompt that are kept as they are.
    """

    mode: str = "k8v4h"
    group: int = 0
    exact_layers: tuple[int, ...] = field(default=())
    exact_tokens: int = 4

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            near = get_close_matches(self.mode, MODES, 1)
            raise ConfigError(
                f"mode {self.mode!r} is not known; did you mean {near[0]!r}?"
                if near
                else f"mode {self.mode!r} is not one of {', '.join(MODES)}"
            )
        if not 0 <= self.group <= 65535:
            raise ConfigError(f"group is 0 to 65535 tokens, not {self.group}")
        if not 0 <= self.exact_tokens <= 64:
            raise ConfigError(f"exact_tokens is 0 to 64, not {self.exact_tokens}")
