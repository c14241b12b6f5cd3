"""Options of the tier."""

from dataclasses import dataclass

from lmcache_core.spi import ByteSize


@dataclass(frozen=True, slots=True)
class SqliteConfig:
    """Options.

    Attributes:
        path: the file; made when it is not there.
        size: how large the file may become; a store beyond it is refused.
    """

    path: str
    size: ByteSize
