"""Plugins with every sort of option, offered without being installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lmcache_core.config import Effective, load
from lmcache_core.registry import Offer, Registry
from lmcache_core.spi import (
    AbstractBackend,
    ByteSize,
    BytesSerde,
    Duration,
    EvictionPolicy,
    KeyManager,
    Secret,
    TensorSerde,
    Wrapper,
)


class Stub(AbstractBackend):
    """A backend that configuration never opens."""

    def __init__(self, config: Any, context: Any, /) -> None: ...
    async def aclose(self) -> None: ...
    async def lookup(self, keys: Any, /, **_: Any) -> Any: ...
    async def load(self, batch: Any, /, **_: Any) -> Any: ...
    async def store(self, batch: Any, /, **_: Any) -> Any: ...
    async def delete(self, keys: Any, /) -> Any: ...


@dataclass(frozen=True)
class CpuOptions:
    size: ByteSize = ByteSize(1)
    huge_pages: bool = False
    numa_node: int | None = None


class Cpu(Stub):
    config_type = CpuOptions


@dataclass(frozen=True)
class DiskOptions:
    path: tuple[Path, ...]
    sync: Literal["none", "power"] = "none"
    threads: int = 4

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError("threads must be at least 1")


class Disk(Stub):
    config_type = DiskOptions


@dataclass(frozen=True)
class Tls:
    verify: bool = True
    ca: Path | None = None


@dataclass(frozen=True)
class RedisOptions:
    url: str
    password: Secret | None = None
    tls: Tls = Tls()
    prefix: str = "kv"
    timeout: Duration = Duration(1.0)
    weights: Mapping[str, float] = field(default_factory=dict)
    nodes: Sequence[str] = ()


class Redis(Stub):
    config_type = RedisOptions


@dataclass(frozen=True)
class S3Options:
    url: str
    region: str = "eu"


class S3(Stub):
    config_type = S3Options


@dataclass(frozen=True)
class PeerOptions:
    channel: str = "tcp"


class Peers(Stub):
    config_type = PeerOptions


@dataclass(frozen=True)
class RailOptions:
    backend: str = ""
    path: str = ""
    params: Mapping[str, bool | int | str] = field(default_factory=dict)
    access_key: Secret = Secret("")
    secret_key: Secret = Secret("")


@dataclass(frozen=True)
class NixlOptions(RailOptions):
    rails: tuple[RailOptions, ...] = ()


class Nixl(Stub):
    config_type = NixlOptions


@dataclass(frozen=True)
class PolicyOptions:
    small: float = 0.1


class Policy(EvictionPolicy):
    config_type = PolicyOptions

    def __init__(self, config: Any, capacity: int, /) -> None: ...
    def insert(self, slot: int, fingerprint: int, nbytes: int, cost: float, /) -> None: ...
    def touch(self, slots: Any, /) -> None: ...
    def victim(self, busy: Any, /) -> int | None: ...
    def remove(self, slot: int, /, *, evicted: bool = False) -> None: ...
    def check(self) -> None: ...


@dataclass(frozen=True)
class NoOptions:
    pass


@dataclass(frozen=True)
class QuantOptions:
    bits: int = 8


class Quant(TensorSerde):
    config_type = QuantOptions
    wire_id = "quant"
    lossless = False

    def __init__(self, config: Any, /) -> None: ...
    def encode(self, info: Any, source: Any, into: Any, /) -> int: ...  # type: ignore[empty-body]
    def decode(self, info: Any, source: Any, into: Any, /) -> None: ...
    def bound(self, spec: Any, /) -> int: ...  # type: ignore[empty-body]


class Zip(BytesSerde):
    config_type = NoOptions
    wire_id = "zip"
    lossless = True

    def __init__(self, config: Any, /) -> None: ...
    def encode(self, info: Any, source: Any, into: Any, /) -> int: ...  # type: ignore[empty-body]
    def decode(self, info: Any, source: Any, into: Any, /) -> None: ...
    def bound(self, nbytes: int, /) -> int: ...  # type: ignore[empty-body]


@dataclass(frozen=True)
class BreakerOptions:
    open_after: int = 3


class Breaker(Wrapper):
    config_type = BreakerOptions


@dataclass(frozen=True)
class RegionOptions:
    region: str = "eu"


class Region(KeyManager):
    config_type = RegionOptions

    def __init__(self, config: Any, /) -> None: ...
    def fields(self, labels: Any, /) -> Any: ...


class Watch:
    config_type = NoOptions

    def __init__(self, config: Any, /) -> None: ...
    def observe(self, event: Any, /) -> None: ...


OFFERS = tuple(
    Offer(kind, name, f"{__name__}:{target}")
    for kind, names in {
        "backends": {
            "cpu": "Cpu", "disk": "Disk", "redis": "Redis", "s3": "S3", "fs": "Disk", "p2p": "Peers",
            "nixl": "Nixl",
        },
        "policies": {"lru": "Policy", "s3fifo": "Policy"},
        "serdes": {"quant": "Quant", "zip": "Zip"},
        "wrappers": {"breaker": "Breaker"},
        "key_managers": {"region": "Region"},
        "observers": {"watch": "Watch"},
    }.items()
    for name, target in names.items()
)  # fmt: skip


def read(folder: Path, text: str, **sources: Any) -> Effective:
    """Load ``kv.yaml`` holding ``text``, with an empty environment unless one is given."""
    file = folder / "kv.yaml"
    file.write_text(text)
    return load(file, **{"env": {}, "registry": registry(), **sources})


def registry() -> Registry:
    return Registry(environment={}, find=lambda: OFFERS, catalogue=())
