"""Field types for plugin configuration records.

A ``config_type`` is a frozen dataclass. Core binds a mapping to it strictly: unknown keys are refused with
the nearest valid one. Fields of these types accept the written forms below.
"""

from __future__ import annotations

import re
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


class ByteSize(int):
    """Bytes: ``20GB`` is 20 * 10**9, ``20GiB`` is 20 * 2**30, a plain number is bytes."""

    @classmethod
    def parse(cls, written: object, /) -> Self:
        """Read a number or text.

        Raises:
            ValueError: not a size, negative, or an unknown unit (the message names the nearest one).
        """
        if isinstance(written, int) and not isinstance(written, bool) and written >= 0:
            return cls(written)
        match = _QUANTITY.fullmatch(written) if isinstance(written, str) else None
        if match is None:
            raise ValueError(f"not a size: {written!r} (examples: 20GB, 512MiB, 4096)")
        number, unit = match.groups()
        factor = _BYTE_UNITS.get(unit.upper())
        if factor is None:
            near = get_close_matches(unit.upper(), _BYTE_UNITS, 1)
            nearest = near[0].replace("IB", "iB") if near else "GB"
            raise ValueError(f"unknown unit {unit!r} in size {written!r}; did you mean {nearest}?")
        return cls(round(float(number) * factor) if "." in number else int(number) * factor)


class Duration(float):
    """Seconds: ``50ms``, ``2s``, ``5m``, ``1h``, ``1d``; a plain number is seconds."""

    @classmethod
    def parse(cls, written: object, /) -> Self:
        """Read a number or text.

        Raises:
            ValueError: not a duration, negative, or an unknown unit (the message names the nearest one).
        """
        if isinstance(written, (int, float)) and not isinstance(written, bool) and written >= 0:
            return cls(written)
        match = _QUANTITY.fullmatch(written) if isinstance(written, str) else None
        if match is None:
            raise ValueError(f"not a duration: {written!r} (examples: 50ms, 2s, 1d)")
        number, unit = match.groups()
        factor = _TIME_UNITS.get(unit.lower())
        if factor is None:
            near = get_close_matches(unit.lower(), _TIME_UNITS, 1)
            raise ValueError(
                f"unknown unit {unit!r} in duration {written!r}; did you mean {near[0] if near else 's'}?"
            )
        return cls(float(number) * factor)


class Secret(str):
    """Text that is never shown: ``repr`` and ``str.format`` print stars; ``reveal`` gives the text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"

    def __str__(self) -> str:
        return "***"

    def __format__(self, format_spec: str) -> str:
        return "***"

    def reveal(self) -> str:
        """The text itself, for the one place that needs it."""
        return self[:]
