"""Field types for plugin configuration records.

A ``config_type`` is a frozen dataclass. Core binds a mapping to it strictly: unknown keys are refused with
the nearest valid one. Fields of these types accept the written forms below.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Self

_BYTE_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "PIB": 2**50,
}  # fmt: skip
_TIME_UNITS = {
    "us": 1e-6, "ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def _parse(
    written: object, what: str, examples: str, units: Mapping[str, float], usual: str
) -> float:
    """A number or text as a number of base units; whole numbers stay exact."""
    if isinstance(written, (int, float)) and not isinstance(written, bool) and written >= 0:
        return written
    match = _QUANTITY.fullmatch(written) if isinstance(written, str) else None
    if match is None:
        raise ValueError(f"not a {what}: {written!r} (examples: {examples})")
    number, unit = match.groups()
    spelled = {name.lower(): name for name in units}
    if unit.lower() not in spelled:
        near = spelled[(get_close_matches(unit.lower(), spelled, 1) or [usual.lower()])[0]]
        raise ValueError(f"unknown unit {unit!r} in {what} {written!r}; did you mean {near}?")
    value = float(number) if "." in number else int(number)
    return value * units[spelled[unit.lower()]]


class ByteSize(int):
    """Bytes: ``20GB`` is 20 * 10**9, ``20GiB`` is 20 * 2**30, a plain number is bytes."""

    @classmethod
    def parse(cls, written: object, /) -> Self:
        """Read a number or text.

        Raises:
            ValueError: not a size, negative, or an unknown unit (the message names the nearest one).
        """
        value = _parse(written, "size", "20GB, 512MiB, 4096", _BYTE_UNITS, "GB")
        if isinstance(written, float):
            raise ValueError(f"not a size: {written!r} (examples: 20GB, 512MiB, 4096)")
        return cls(round(value))


class Duration(float):
    """Seconds: ``50ms``, ``2s``, ``5m``, ``1h``, ``1d``; a plain number is seconds."""

    @classmethod
    def parse(cls, written: object, /) -> Self:
        """Read a number or text.

        Raises:
            ValueError: not a duration, negative, or an unknown unit (the message names the nearest one).
        """
        return cls(_parse(written, "duration", "50ms, 2s, 1d", _TIME_UNITS, "s"))


class Secret:
    """Text that is never shown, whatever prints its record: only ``reveal`` gives it. Empty text is false."""

    __slots__ = ("_text",)

    def __init__(self, text: str = "", /) -> None:
        self._text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __bool__(self) -> bool:
        return bool(self._text)

    def __repr__(self) -> str:
        return "'***'"

    def __str__(self) -> str:
        return "***"

    def reveal(self) -> str:
        """The text itself, for the one place that needs it."""
        return self._text
