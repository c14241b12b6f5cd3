"""The HTTP proxy on the way to a server, if there is one."""

from __future__ import annotations

import base64
import urllib.request
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

from lmcache_backend_s3.config import FROM_ENVIRONMENT, NO_PROXY, ObjectConfig
from lmcache_core.spi import ConfigError

PORT = 8080


@dataclass(frozen=True, slots=True)
class Proxy:
    """Where it listens, and the headers that prove who asks."""

    host: str
    port: int
    headers: dict[str, str] = field(repr=False)

    def __str__(self) -> str:
        return f"proxy {self.host}:{self.port}"


def find(config: ObjectConfig, place: SplitResult, /) -> Proxy | None:
    """The proxy that the configuration names for an endpoint, else the environment; None for the straight way.

    Raises:
        ConfigError: what is named cannot be used.
    """
    proof = config.proxy_auth.reveal()
    if config.proxy == NO_PROXY:
        return None
    if config.proxy != FROM_ENVIRONMENT:
        return _proxy("option proxy", config.proxy, proof)
    known = urllib.request.getproxies_environment()
    written = known.get(place.scheme, "")
    if not written or urllib.request.proxy_bypass(place.netloc, known):
        return None
    written = written if "://" in written else f"http://{written}"
    return _proxy(f"{place.scheme}_proxy of the environment", written, proof)


def _proxy(source: str, written: str, proof: str) -> Proxy:
    """Raises ``ConfigError``, without what is written: a password may be in it."""
    wrong = ConfigError(f"{source} is not http://[USER:PASSWORD@]HOST:PORT")
    try:
        where = urlsplit(written)
        host, port = where.hostname, where.port or PORT
    except ValueError:
        raise wrong from None
    if where.scheme != "http" or not host:
        raise wrong
    if where.username and not proof:
        proof = f"{unquote(where.username)}:{unquote(where.password or '')}"
    basic = base64.b64encode(proof.encode()).decode()
    return Proxy(host, port, {"proxy-authorization": f"Basic {basic}"} if proof else {})
