"""Options of ``drop``."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_core.spi import ConfigError


@dataclass(frozen=True, slots=True)
class DropOptions:
    """Options of ``drop``.

    Attributes:
        keep: share of a chunk's tokens that stays, in each layer.
        recent: of them, at least so many at the end of the chunk.
        exact_tokens: first tokens of a prompt that stay besides (attention sinks).
    """

    keep: float = 0.5
    recent: int = 32
    exact_tokens: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ConfigError(f"keep is a share above 0 and up to 1, not {self.keep}")
        if not 0 <= self.recent <= 65535:
            raise ConfigError(f"recent is 0 to 65535 tokens, not {self.recent}")
        if not 0 <= self.exact_tokens <= 64:
            raise ConfigError(f"exact_tokens is 0 to 64, not {self.exact_tokens}")
