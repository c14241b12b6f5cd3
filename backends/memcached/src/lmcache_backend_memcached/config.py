"""Options of the tier."""

from dataclasses import dataclass

from lmcache_core.spi import ConfigError, Duration

SCHEME = "memcached://"
PORT = 11211


@dataclass(frozen=True, slots=True, kw_only=True)
class MemcachedConfig:
    """Which server.

    Attributes:
        server: ``HOST:PORT`` or ``memcached://HOST[:PORT]``, or the path of a unix socket.
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

    @property
    def address(self) -> str | tuple[str, int]:
        """A path, or host and port.

        Raises:
            ConfigError: ``server`` is neither.
        """
        place = self.server.removeprefix(SCHEME)
        if place.startswith("/"):
            return place
        if place != self.server:  # a URL may leave the port out, and may end like one
            place = place.removesuffix("/")
            place += f":{PORT}" * (place.endswith("]") or ":" not in place)
        host, _, port = place.rpartition(":")
        if host and "@" not in host and port.isdecimal():
            return host.strip("[]"), int(port)
        shown = self.server.rpartition("@")[2]  # what stands before it may be a secret
        raise ConfigError(f"server {shown!r} is neither HOST:PORT nor a path")


_ALLOWED = str.maketrans(dict.fromkeys(".:_-", "0"))
