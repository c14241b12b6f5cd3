"""Options of ``s3``, ``gs`` and ``az``."""

# No postponed annotations: the binder reads the fields' types at run time.

import re
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from lmcache_core.spi import ByteSize, Duration, Secret

PREFIX = re.compile(r"[A-Za-z0-9._~/-]*")
BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
ENDPOINT = re.compile(r"https?://(\[[0-9a-fA-F:]+\]|[^/@:\[\]\s]+)(:\d{1,5})?/?")
AWS_HOST = re.compile(r"([a-z0-9][a-z0-9.-]*?)\.(s3(?:express-[a-z0-9-]+)?[.-].*amazonaws\.com.*)")
EXPRESS = re.compile(r".+--([a-z0-9-]+)--x-s3")
PROXY = re.compile(r"http://(\[[0-9a-fA-F:]+\]|[^/@:\[\]\s]+):\d{1,5}/?")
FROM_ENVIRONMENT, NO_PROXY = "environment", "off"
PART_LEAST = 5 << 20
"""Shortest part but the last that S3 takes."""


class Addressing(Enum):
    """Where the name of the bucket stands."""

    AUTO = "auto"
    """In the host name at AWS, in the path elsewhere."""
    PATH = "path"
    VIRTUAL = "virtual"


class Conditional(Enum):
    """Whether a store asks the server to refuse a name that is taken."""

    AUTO = "auto"
    """Where the server can (tried at start), else look first."""
    REQUIRED = "required"
    """Refuse to start where it cannot."""
    OFF = "off"
    """Look first; two writers at one moment may both write, the same bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectConfig:
    """What all object stores share.

    Attributes:
        url: ``SCHEME://BUCKET[/PREFIX]``; what is under the prefix belongs to this cache.
        endpoint: ``http[s]://HOST[:PORT]`` of a server that is not the provider's own.
        ca_file: certificates to trust instead of the system's.
        proxy: ``http://HOST:PORT`` of an HTTP proxy; ``environment``: as ``HTTPS_PROXY``, ``HTTP_PROXY`` and ``NO_PROXY``
            say; ``off``: none.
        proxy_auth: ``USER:PASSWORD`` for the proxy.
        timeout: longest wait for one step of a request without progress.
        connect_timeout: longest wait for a connection.
        threads: most requests at once.
        part_size: values at least twice as long are loaded in parts where threads are free.
        multipart_above: longer values are stored in parts.
        conditional: see ``Conditional``.
        max_capacity: stores are refused while the prefix holds this much; None for no limit.
    """

    schemes: ClassVar[tuple[str, ...]] = ()

    url: str
    endpoint: str = ""
    ca_file: str = ""
    proxy: str = FROM_ENVIRONMENT
    proxy_auth: Secret = Secret("")
    timeout: Duration = Duration(5.0)
    connect_timeout: Duration = Duration(2.0)
    threads: int = 32
    part_size: ByteSize = ByteSize(16 << 20)
    multipart_above: ByteSize = ByteSize(64 << 20)
    conditional: Conditional = Conditional.AUTO
    max_capacity: ByteSize | None = None

    def __post_init__(self) -> None:
        scheme, separator, _ = self.url.partition("://")
        if not separator or scheme not in self.schemes:
            raise ValueError(f"url is {self.url!r}; write {self.schemes[0]}://BUCKET/PREFIX")
        if not BUCKET.fullmatch(self.bucket):
            raise ValueError(f"url names no bucket that can be: {self.bucket!r}")
        if not PREFIX.fullmatch(self.prefix):
            raise ValueError(
                f"url has a prefix with other characters than A-Z a-z 0-9 . _ ~ - /: {self.prefix!r}"
            )
        if self.endpoint and not ENDPOINT.fullmatch(self.endpoint):
            raise ValueError(
                f"endpoint is {self.endpoint!r}; write http://HOST:PORT or https://HOST"
            )
        if self.proxy not in (FROM_ENVIRONMENT, NO_PROXY) and not PROXY.fullmatch(self.proxy):
            raise ValueError(
                "proxy is neither http://HOST:PORT (name and password go into proxy_auth), "
                f"nor {FROM_ENVIRONMENT}, nor {NO_PROXY}"
            )
        if self.part_size < PART_LEAST:
            raise ValueError(f"part_size is {self.part_size}; the least is {PART_LEAST}")
        if self.threads < 1 or self.timeout <= 0 or self.connect_timeout <= 0:
            raise ValueError("threads and timeouts are more than zero")

    @property
    def place(self) -> tuple[str, str]:
        """What the URL calls the bucket, and the rest."""
        host, _, path = self.url.partition("://")[2].partition("/")
        return host, path

    @property
    def bucket(self) -> str:
        return self.place[0]

    @property
    def prefix(self) -> str:
        """Begin of every name, ``""`` or ending in a slash."""
        path = self.place[1].strip("/")
        return f"{path}/" if path else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Config(ObjectConfig):
    """Options of ``s3``: those of ``ObjectConfig``, and these.

    Attributes:
        region: of the bucket; empty: as the AWS configuration of this process says, else ``us-east-1``.
        access_key, secret_key, session_token: credentials; empty: found as AWS tools find them, and renewed.
        profile: section of the AWS configuration files.
        addressing: see ``Addressing``.
    """

    schemes: ClassVar[tuple[str, ...]] = ("s3",)

    region: str = ""
    access_key: Secret = Secret("")
    secret_key: Secret = Secret("")
    session_token: Secret = Secret("")
    profile: str = ""
    addressing: Addressing = Addressing.AUTO

    def __post_init__(self) -> None:
        # Python 3.11: with slots, super() without arguments looks at the class before it was remade.
        ObjectConfig.__post_init__(self)
        if bool(self.access_key) != bool(self.secret_key):
            raise ValueError("access_key and secret_key go together")

    @property
    def bucket(self) -> str:
        match = AWS_HOST.fullmatch(self.place[0])
        return match[1] if match else self.place[0]

    @property
    def host(self) -> str:
        """Of a URL that names bucket and host, else empty."""
        match = AWS_HOST.fullmatch(self.place[0])
        return match[2] if match else ""

    @property
    def zone(self) -> str:
        """Availability zone of a directory bucket (S3 Express), else empty."""
        match = EXPRESS.fullmatch(self.bucket)
        return match[1] if match else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GSConfig(ObjectConfig):
    """Options of ``gs``: those of ``ObjectConfig``, and these.

    Attributes:
        access_key, secret_key: HMAC key of a service account; empty: tokens of this machine's account.
    """

    schemes: ClassVar[tuple[str, ...]] = ("gs",)

    access_key: Secret = Secret("")
    secret_key: Secret = Secret("")

    def __post_init__(self) -> None:
        ObjectConfig.__post_init__(self)
        if bool(self.access_key) != bool(self.secret_key):
            raise ValueError("access_key and secret_key go together")


@dataclass(frozen=True, slots=True, kw_only=True)
class AzConfig(ObjectConfig):
    """Options of ``az``: those of ``ObjectConfig`` (the bucket is the container), and these.

    Attributes:
        account: name of the storage account.
        account_key: one of its keys.
        sas_token: a shared access signature instead of a key.
    """

    schemes: ClassVar[tuple[str, ...]] = ("az", "azure")

    account: str
    account_key: Secret = Secret("")
    sas_token: Secret = Secret("")

    def __post_init__(self) -> None:
        ObjectConfig.__post_init__(self)
        if bool(self.account_key) == bool(self.sas_token):
            raise ValueError("account_key or sas_token is needed, one of them")
        if not re.fullmatch(r"[a-z0-9]{3,24}", self.account):
            raise ValueError(f"account is {self.account!r}; it has 3 to 24 of a-z and 0-9")
