"""Options of ``infinistore``."""

# No postponed annotations: the binder reads the fields' types at run time.

from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from lmcache_core.spi import Duration

PORT = 12345
LINKS = ("Ethernet", "IB")


@dataclass(frozen=True, slots=True, kw_only=True)
class InfiniStoreConfig:
    """Which server, and the way values take.

    Attributes:
        url: ``infinistore://HOST[:PORT]``, ``?device=`` before the option of that name.
        device: RDMA device, such as ``mlx5_0``, for which ``infinistore`` must be installed; empty: TCP.
        ib_port: port of the device.
        link_type: ``Ethernet`` (RoCE) or ``IB``.
        prefix: of every key.
        threads: most connections at once.
        timeout: longest silence of the server, and longest wait for a connection.
    """

    url: str
    device: str = ""
    ib_port: int = 1
    link_type: str = "Ethernet"
    prefix: str = "lmcache:"
    threads: int = 4
    timeout: Duration = Duration(1.0)

    def __post_init__(self) -> None:
        where = urlsplit(self.url)
        if where.scheme != "infinistore" or not where.hostname:
            raise ValueError(f"url is {self.url!r}; write infinistore://HOST:PORT")
        if self.link_type not in LINKS:
            raise ValueError(f"link_type is {self.link_type!r}; known: {', '.join(LINKS)}")
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {self.threads}")
        if not 0 < len(self.prefix) <= 100 or not self.prefix.isascii():
            raise ValueError(f"prefix is {self.prefix!r}; it has 1 to 100 ASCII characters")

    @property
    def place(self) -> tuple[str, int]:
        """Host and port of the server."""
        where = urlsplit(self.url)
        return where.hostname or "", where.port or PORT

    @property
    def rdma(self) -> str:
        """The RDMA device; empty: TCP."""
        return parse_qs(urlsplit(self.url).query).get("device", [""])[0] or self.device
