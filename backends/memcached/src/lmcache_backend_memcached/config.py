"""Options of the tier."""

from dataclasses import dataclass

from lmcache_core.spi import Duration


@dataclass(frozen=True, slots=True, kw_only=True)
class MemcachedConfig:
    """Which server.

    Attributes:
        server: ``HOST:PORT``, or the path of a unix socket.
        prefix: of every key, at most 100 letters, digits, ``.``, ``:``, ``_`` and ``-``.
        threads: most connections at once.
        timeout: longest silence of the server, and longest wait for a connection.
    """

    server: str
    prefix: str = "lmcache:"
    threads: int = 4
    timeout: Duration = Duration(1.0)

    def __post_init__(self) -> None:
        if len(self.prefix) > 100 or not self.prefix.translate(_ALLOWED).isalnum():
            raise ValueError(f"prefix cannot begin a key: {self.prefix!r}")


_ALLOWED = str.maketrans(dict.fromkeys(".:_-", "0"))
