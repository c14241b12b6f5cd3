"""Options of ``cachegen`` and ``klt``."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_core.spi import ConfigError
from lmcache_serde_cachegen.tables import TablesFile

LEVELS = 5
"""Rungs of the ladder of either codec; 1 loses least, the last takes the fewest bytes."""


@dataclass(frozen=True, slots=True)
class CalibratedOptions:
    """Options of both.

    Attributes:
        tables: file that ``lmcache calibrate MODEL`` wrote for this very model; its digest is part of the
            key space.
        level: 1 (loses least) to 5 (fewest bytes). Any level is decoded, whatever is chosen here.
        exact_tokens: first tokens of a prompt that are kept as they are.
    """

    tables: TablesFile = TablesFile()  # noqa: RUF009  immutable
    level: int = 2
    exact_tokens: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.tables, TablesFile):  # options that no configuration file bound
            object.__setattr__(self, "tables", TablesFile.parse(self.tables))  # type: ignore[unreachable]
        if not 1 <= self.level <= LEVELS:
            raise ConfigError(f"level is 1 to {LEVELS}, not {self.level}")
        if not 0 <= self.exact_tokens <= 64:
            raise ConfigError(f"exact_tokens is 0 to 64, not {self.exact_tokens}")


class KltOptions(CalibratedOptions):
    """Options of ``klt``."""

    __slots__ = ()


class CacheGenOptions(CalibratedOptions):
    """Options of ``cachegen``."""

    __slots__ = ()
