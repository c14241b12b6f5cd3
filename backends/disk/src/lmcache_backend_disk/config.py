"""Options of ``disk`` and ``fs``."""

# No postponed annotations: the binder reads the fields' types at run time.

from dataclasses import dataclass
from enum import Enum


class Direct(Enum):
    """Whether transfers go past the page cache."""

    AUTO = "auto"
    """Where the file system can (tried at start)."""
    ON = "on"
    """Refuse to start where it cannot."""
    OFF = "off"


class Sync(Enum):
    """What a power loss may take of a value whose store was acknowledged."""

    DURABLE = "durable"
    """Nothing: bytes, then name are on the medium before the answer."""
    ORDERED = "ordered"
    """The whole value, never a part: bytes are on the medium before the name appears."""
    NONE = "none"
    """Anything; frame digests tell. The end of the process takes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskConfig:
    """Options of ``disk`` and ``fs``.

    Attributes:
        path: one folder, or several on different devices; values are spread over them by digest.
        direct: see ``Direct``.
        sync: see ``Sync``.
        verify_writes: read every value back before it becomes visible (means something with direct transfers).
        threads: system calls running at once. More than a disk's queue needs, because some wait for its journal.
        fan_out: folders per path that values are spread over: 16, 256 or 4096. A folder keeps the number it
            was made with.
    """

    path: str | tuple[str, ...]
    direct: Direct = Direct.AUTO
    sync: Sync = Sync.ORDERED
    verify_writes: bool = False
    threads: int = 16
    fan_out: int = 256

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {self.threads}")

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path
