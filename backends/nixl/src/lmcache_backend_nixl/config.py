"""Options of ``nixl``."""

# No postponed annotations: the binder reads the fields' types at run time.

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from lmcache_core.spi import ByteSize, Duration, Secret

FILES = ("POSIX", "GDS", "GDS_MT", "HF3FS")
OBJECTS = ("OBJ", "AZURE_BLOB", "DOCA_MEMOS")
PEERS = ("UCX", "LIBFABRIC")
PLUGINS = (*FILES, *OBJECTS, *PEERS)
ADDRESS = re.compile(r"(tcp://)?(\[[0-9a-fA-F:]+\]|[^/@:\[\]\s]+):(\d{1,5})/?")
_MEMBER = r"(?:\[[0-9a-fA-F:]+\]|[^/@:,\[\]\s]+):\d{1,5}"
ETCD = re.compile(rf"etcd://({_MEMBER}(?:,{_MEMBER})*)/([A-Za-z0-9._-]+)")
STRIPE_LEAST = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RailConfig:
    """One way to a place: a NIXL plugin, and what it needs.

    Attributes:
        backend: name of the NIXL plugin.
        path: folder of a plugin that moves files.
        address: ``HOST:PORT`` of an ``lmcache nixl-target``, for a plugin that moves memory; or
            ``etcd://HOST:PORT[,HOST:PORT...]/NAME`` where it has announced itself.
        params: parameters of the NIXL plugin, by its own names.
        access_key, secret_key: credentials of a plugin that moves objects; parameters that are not shown.
    """

    backend: str = "POSIX"
    path: str = ""
    address: str = ""
    params: Mapping[str, bool | int | str] = field(default_factory=dict)
    access_key: Secret = Secret("")
    secret_key: Secret = Secret("")

    def __post_init__(self) -> None:
        if self.backend not in PLUGINS:
            near = (get_close_matches(self.backend.upper(), PLUGINS, 1) or PLUGINS)[0]
            raise ValueError(f"backend is {self.backend!r}; did you mean {near}?")
        if self.backend in FILES and not self.path.startswith("/"):
            raise ValueError(f"path of {self.backend} is {self.path!r}; write a whole path")
        if self.backend in PEERS and not (ADDRESS.fullmatch(self.address) or self.named):
            raise ValueError(
                f"address of {self.backend} is {self.address!r}; write HOST:PORT or etcd://HOST:PORT/NAME"
            )

    @property
    def parameters(self) -> dict[str, str]:
        """What NIXL is given, as text."""
        given = {
            k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in self.params.items()
        }
        for name in ("access_key", "secret_key"):
            if secret := getattr(self, name):
                given[name] = secret.reveal()
        return given

    @property
    def named(self) -> bool:
        """Whether ``address`` is a name in etcd."""
        return ETCD.fullmatch(self.address) is not None

    @property
    def host(self) -> tuple[str, int]:
        match = ADDRESS.fullmatch(self.address)
        assert match is not None, "checked when it was made"
        return match[2].strip("[]"), int(match[3])


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlConfig(RailConfig):
    """Options of ``nixl``: those of one rail, or several in ``rails``, and these.

    Attributes:
        rails: several places at once; a value of two stripes or more is spread over all of them.
        stripe: shortest part of a value that is spread.
        direct: transfers of files go past the page cache where alignment allows.
        sync: bytes and name of a file are on the medium before a store is acknowledged.
        shared: other nodes use the folder, too; nothing is locked and nothing evicted.
        timeout: longest wait for an answer of a target.
        token: what a target asks for.
        staging: memory for values that do not lie in registered memory (memory plugins only).
        threads: system calls running at once.
    """

    backend: str = ""
    rails: tuple[RailConfig, ...] = ()
    stripe: ByteSize = ByteSize(1 << 20)
    direct: bool = True
    sync: bool = False
    shared: bool = False
    timeout: Duration = Duration(5.0)
    token: Secret = Secret("")
    staging: ByteSize = ByteSize(64 << 20)
    threads: int = 8

    def __post_init__(self) -> None:
        if self.rails and (self.backend or self.path or self.address):
            raise ValueError("rails stand instead of backend, path and address, not beside them")
        if self.stripe < STRIPE_LEAST:
            raise ValueError(f"stripe is {self.stripe}; the least is {STRIPE_LEAST}")
        if self.threads < 2 or self.timeout <= 0:
            raise ValueError("threads are two or more, timeout is more than zero")
        assert self.all  # each rail refuses what it cannot be

    @property
    def all(self) -> tuple[RailConfig, ...]:
        """Every rail."""
        if self.rails:
            return self.rails
        names = RailConfig.__dataclass_fields__
        one = {name: getattr(self, name) for name in names} | {"backend": self.backend or "POSIX"}
        return (RailConfig(**one),)
