"""Options of ``redis`` and ``valkey``, and where a URL points."""

# No postponed annotations: the binder reads the fields' types at run time.

from dataclasses import dataclass
from difflib import get_close_matches
from urllib.parse import parse_qs, unquote, urlsplit

from lmcache_backend_redis.resp import LONGEST
from lmcache_core.spi import ByteSize, ConfigError, Duration, Secret

PORTS = {"redis": 6379, "redis-cluster": 6379, "redis-sentinel": 26379}
KINDS = {
    f"{server}{tls}{way}": f"redis{way}"
    for server in ("redis", "valkey") for tls in ("", "s") for way in ("", "-cluster", "-sentinel")
} | {"resp": "redis", "unix": "unix"}  # fmt: skip
"""Every scheme, and what it leads to; an ``s`` behind the server's name means TLS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Encryption of the connection, used with ``rediss://`` and the like.

    Attributes:
        ca: file with the certificates to trust; the system's where empty.
        cert, key: files with this client's certificate, for servers that ask for one.
        verify: refuse a server whose certificate or name is wrong.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    verify: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisConfig:
    """Which server, and how.

    Attributes:
        url: ``redis://[USER:PASSWORD@]HOST[:PORT][/DB]``, ``rediss://``, ``unix:///PATH[?db=DB]``,
            ``redis-cluster://HOST:PORT[,HOST:PORT...]``, ``redis-sentinel://HOST:PORT[,HOST:PORT...][/SERVICE]``,
            ``rediss-cluster://`` and ``rediss-sentinel://`` with TLS; ``valkey`` in place of ``redis``, ``resp://``.
        username, password: before those in the URL.
        prefix: of every key; with ``{...}`` in it a cluster keeps all values on one node.
        database: number, not in a cluster.
        service: name of the master that sentinels watch.
        sentinel_username, sentinel_password: of the sentinels, where they ask for one.
        tls: see ``TlsConfig``.
        threads: most connections at once, each on a thread.
        lanes: connections per node that one batch is spread over; more than one pays where the server has I/O threads
            of its own and this node has cores to spare.
        part_size: longest string; a longer value is kept in parts, none longer than the server allows.
        timeout: longest silence of the server.
        connect_timeout: longest wait for a connection.
    """

    url: str
    username: str = ""
    password: Secret = Secret("")
    prefix: str = "lmcache:"
    database: int = 0
    service: str = "mymaster"
    sentinel_username: str = ""
    sentinel_password: Secret = Secret("")
    tls: TlsConfig = TlsConfig()
    threads: int = 4
    lanes: int = 1
    part_size: ByteSize = ByteSize(LONGEST)
    timeout: Duration = Duration(1.0)
    connect_timeout: Duration = Duration(1.0)

    def __post_init__(self) -> None:
        for name in ("threads", "lanes", "part_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.part_size > LONGEST:
            raise ValueError(f"part_size must be at most {LONGEST >> 20}MiB, not {self.part_size}")


@dataclass(frozen=True, slots=True)
class Target:
    """A URL, read. ``hosts`` is empty for a unix socket; ``shown`` has no secret in it."""

    kind: str
    hosts: tuple[tuple[str, int], ...]
    path: str
    database: int
    service: str
    username: str
    password: str
    encrypted: bool
    shown: str


def target_of(config: RedisConfig, /) -> Target:
    """Read ``url`` and what stands beside it.

    Raises:
        ConfigError: no such scheme, host, port or database.
    """
    try:
        parts = urlsplit(config.url)
    except ValueError as error:
        raise ConfigError(f"url of a redis tier: {error}") from None
    kind, place = KINDS.get(parts.scheme, ""), parts.netloc.rpartition("@")[2]
    shown = f"{parts.scheme}://{place}{parts.path}"
    if not kind:
        scheme = parts.scheme or config.url.rpartition("://")[0]
        near = get_close_matches(scheme, KINDS, 1)
        hint = f"did you mean {near[0]}://?" if near else f"valid: {', '.join(sorted(KINDS))}"
        raise ConfigError(f"no redis url: no scheme {scheme!r}; {hint}")
    unix, service, database = kind == "unix", config.service, config.database
    last = parts.path.strip("/")
    written = parse_qs(parts.query).get("db", [""])[0]
    if kind == "redis-sentinel":
        service = last or service
    elif not unix:
        written = written or last
    if written:
        if not written.isdecimal():
            raise ConfigError(f"{shown}: database {written!r} is no number")
        database = int(written)
    hosts = () if unix else tuple(_address(one, PORTS[kind], shown) for one in place.split(","))
    if unix and not last:
        raise ConfigError(f"{shown}: a unix socket needs an absolute path: unix:///PATH")
    if database and kind == "redis-cluster":
        raise ConfigError(f"{shown}: a cluster has database 0 only, not {database}")
    user, _, secret = parts.netloc.rpartition("@")[0].partition(":")
    return Target(
        kind=kind,
        hosts=hosts,
        path=unquote(parts.path) if unix else "",
        database=database,
        service=service,
        username=config.username or unquote(user),
        password=config.password.reveal() or unquote(secret),
        encrypted=parts.scheme.partition("-")[0] in ("rediss", "valkeys"),
        shown=shown,
    )


def _address(text: str, port: int, shown: str) -> tuple[str, int]:
    host, colon, digits = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, digits = text, str(port)
    host = host.strip("[]")
    if not host or not digits.isdecimal() or not 0 < int(digits) < 65536:
        raise ConfigError(f"{shown}: {text!r} is no HOST:PORT")
    return host, int(digits)
