"""Options of ``mooncake``."""

# No postponed annotations: the binder reads the fields' types at run time.

from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from lmcache_core.spi import ByteSize, Duration

PORT = 50051
PROTOCOLS = ("tcp", "rdma")
ELECTED = "etcd"
"""What knows the leading master, by scheme; the wheels' client has no other."""
LONGEST_S = 50.0
"""The client leaves a transfer to itself after 60 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeConfig:
    """Which store, and this node's part in it.

    Attributes:
        url: ``mooncakestore://HOST[:PORT]`` of the master, ``?protocol=`` and ``?device=`` before the options of that
            name; or ``etcd://HOST:PORT[,HOST:PORT...]`` of what elects one of several masters.
        segment: memory that this node lends to the store; 0 uses the others' only.
        protocol: ``tcp`` or ``rdma``.
        device: names of RDMA devices, with commas; empty: found by the client.
        metadata: how clients find each other, the same for all: ``P2PHANDSHAKE``, or the address of a metadata server.
        host, port: where other nodes reach this one; empty and 0: the address that the master is reached from, a free port.
        replicas: copies of every value, in as many segments.
        prefer: segment to write to while it has room; empty: any.
        tenant: name space that the master keeps apart.
        admin: ``HOST:PORT`` of the master's metrics, for listing and usage; empty: neither.
        lease: the master's ``--default_kv_lease_ttl``: how long a value that was looked up stays.
        buffer: memory of the client itself.
        prefix: of every key.
        threads: most calls at once.
        lanes: calls that one batch is spread over.
        timeout: longest wait for the master, and for a call that moves at most 64 MiB.
    """

    url: str
    segment: ByteSize = ByteSize(0)
    protocol: str = "tcp"
    device: str = ""
    metadata: str = "P2PHANDSHAKE"
    host: str = ""
    port: int = 0
    replicas: int = 1
    prefer: str = ""
    tenant: str = "default"
    admin: str = ""
    lease: Duration = Duration(10.0)
    buffer: ByteSize = ByteSize(16 << 20)
    prefix: str = "lmcache:"
    threads: int = 4
    lanes: int = 1
    timeout: Duration = Duration(2.0)

    def __post_init__(self) -> None:
        scheme, _, rest = self.url.partition("://")
        if scheme not in ("mooncakestore", ELECTED) or not rest.strip("/"):
            raise ValueError(
                f"url is {self.url!r}; write mooncakestore://HOST:PORT or etcd://HOST:PORT"
            )
        if self.over not in PROTOCOLS:
            raise ValueError(f"protocol is {self.over!r}; known: {', '.join(PROTOCOLS)}")
        for name in ("threads", "lanes", "replicas"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.timeout <= LONGEST_S:
            raise ValueError(f"timeout is {self.timeout:g} s; at most {LONGEST_S:g} s")

    @property
    def master(self) -> str:
        """Address of the master, as the client takes it."""
        if self.elected:
            return self.url.replace(",", ";")
        where = urlsplit(self.url)
        return f"{where.hostname}:{where.port or PORT}"

    @property
    def elected(self) -> bool:
        """Whether it is one of several."""
        return self.url.startswith(f"{ELECTED}://")

    @property
    def over(self) -> str:
        """The protocol."""
        return self._asked("protocol") or self.protocol

    @property
    def devices(self) -> str:
        """The RDMA devices."""
        return self._asked("device") or self.device

    def _asked(self, name: str) -> str:
        query = urlsplit(self.url).query if self.url.startswith("mooncakestore:") else ""
        return parse_qs(query).get(name, [""])[0]
