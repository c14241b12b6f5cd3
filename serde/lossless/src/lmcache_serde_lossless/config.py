"""Options of the lossless serdes."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_core.spi import ConfigError


@dataclass(frozen=True, slots=True)
class X12Options:
    """Nothing to choose: tables are made from what is encoded."""


@dataclass(frozen=True, slots=True)
class XROptions:
    """Options of ``xr``.

    Attributes:
        pages: bytes of one element (1, 2, 4) in groups whose content is opaque; 0 leaves them alone.
    """

    pages: int = 0

    def __post_init__(self) -> None:
        if self.pages not in (0, 1, 2, 4):
            raise ConfigError(f"pages is 0, 1, 2 or 4 bytes per element, not {self.pages}")


@dataclass(frozen=True, slots=True)
class ZstdOptions:
    """Options of ``zstd``.

    Attributes:
        level: from -7 (fast) to 19 (small).
    """

    level: int = 1

    def __post_init__(self) -> None:
        if not -7 <= self.level <= 19:
            raise ConfigError(f"level is -7 to 19, not {self.level}")
