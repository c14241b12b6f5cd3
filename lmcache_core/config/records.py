"""What a configuration says, as records. Written forms, sources and upstream names are read elsewhere.

``None`` for the options of a plugin means its defaults. Every record can be made by hand in a test.
"""

# No postponed annotations: the binder reads the fields' types at run time.

import string
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Literal, Self

from lmcache_core.spi import ByteSize, Duration, Secret

_NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_-.")


class Share(float):
    """A part of something, 0 to 1; written ``25%`` or ``0.25``."""

    @classmethod
    def parse(cls, written: object, /) -> Self:
        """Read a number or a percentage.

        Raises:
            ValueError: neither, or outside 0 to 1.
        """
        value, text = -1.0, str(written).strip()
        with suppress(ValueError):
            value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        if not 0 <= value <= 1:
            raise ValueError(f"not a share: {written!r} (examples: 25%, 0.25)")
        return cls(value)


Quota = Share | ByteSize


class WritePolicy(Enum):
    """When a new chunk reaches a tier."""

    THROUGH = "through"
    """Before the store is reported done."""
    BACK = "back"
    """Soon, in the background."""
    ON_EVICT = "on-evict"
    """When it leaves the tier above."""


class VerifyHot(Enum):
    """Which loads from memory check the digest once more; bytes that crossed a medium always do."""

    OFF = "off"
    SAMPLE = "sample"
    ALWAYS = "always"


class LoadFailure(Enum):
    """What an engine does with a request whose promised blocks could not be loaded."""

    RECOMPUTE = "recompute"
    KEEP = "keep"
    """Leave the engine's own setting alone."""


class Quality(Enum):
    """What an engine does about a lossy serde that was not measured on its model, or costs too much there."""

    OFF = "off"
    WARN = "warn"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginChoice:
    """A plugin by name and an instance of its ``config_type``: a serde, key manager, observer or wrapper."""

    name: str
    options: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """One tier.

    Attributes:
        plugin: backend name in the registry, ``NAME`` or ``NAME@DISTRIBUTION``.
        name: tells two tiers of one plugin apart; unique.
        options: instance of the backend's ``config_type``.
        size: hard limit in bytes, all processes of this node together. None is for stores that have their
            own (``Usage.limit``, or shared ones); the manager refuses a local tier without any.
        policy: eviction policy.
        write: when new chunks get here.
        after_touches: 1 stores at first sight, 2 only what was asked for before.
        promote: chunks found here are copied into the tiers above.
        ttl: chunks may be forgotten after this long.
        scrub: bytes per second that are read and verified in the background, round after round; none by default.
        deadline: longest wait for one call on a batch; the manager may wait less (cost gate, budgets).
        quotas: limits of single tenants in this tier, before ``TenantConfig.quota``.
        serde: encodings in order of encoding; encryption last.
        ladder: instead of it several chains, finest first: a value is kept in each form, and a load fetches
            what arrives in time.
        ladder_target: a load from the ladder should take no longer; the finest form that makes it is
            fetched. 0 for the finest that is as quick as any.
        wrappers: options of wrappers, by wrapper name; each value an instance of its ``config_type``, or False
            to leave out one that is there unasked.
    """

    plugin: str
    name: str
    options: object = None
    size: ByteSize | None = None
    policy: str = "lru"
    policy_options: object = None
    write: WritePolicy = WritePolicy.THROUGH
    after_touches: int = 1
    promote: bool = True
    ttl: Duration | None = None
    scrub: ByteSize | None = None
    deadline: Duration = Duration(1.0)
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    serde: Annotated[tuple[PluginChoice, ...], "serdes"] = ()
    ladder: tuple[Annotated[tuple[PluginChoice, ...], "serdes"], ...] = ()
    ladder_target: Duration = Duration(0.0)
    wrappers: Annotated[Mapping[str, object], "wrappers"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name or set(self.name) - _NAME_CHARACTERS:
            raise ValueError(f"not a tier name: {self.name!r} (letters, digits, '_', '-', '.')")
        if self.after_touches not in (1, 2):
            raise ValueError(f"after_touches is 1 or 2, not {self.after_touches}")
        if self.ladder and self.serde:
            raise ValueError("serde and ladder are two ways to encode; keep one")

    @property
    def chains(self) -> tuple[tuple[PluginChoice, ...], ...]:
        """Every chain of serdes that values of this tier may go through."""
        return self.ladder or ((self.serde,) if self.serde else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """Limits of one tenant; ``default`` stands for every tenant that is not named."""

    quota: Quota | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginsConfig:
    """Which plugins may load.

    Attributes:
        allow: names that may load, commands and ops apart; None for every installed one.
        deny: names that may not, even when allowed.
        allow_paths: ``module:Class`` is accepted as a plugin name (for development: it runs any code).
    """

    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    allow_paths: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Tokens to chunks.

    Attributes:
        chunk_size: tokens under one key; a layout may need more and then says so once.
        save_partial: store the tail that does not fill a chunk.
        save_decode: store chunks that consist of generated tokens.
        min_retrieve_tokens, min_store_tokens: shorter prefixes are not worth it.
        max_tokens_per_load: most tokens of one load, None for any number.
        verify_hot: see ``VerifyHot``.
        exact: refuse lossy tiers.
        quality: see ``Quality``.
        quality_kl: most that a lossy serde may cost, in nats per token.
        quality_report: file of what was measured, from ``lmcache bench serde MODEL --record FILE``.
        tags_in_key: request tags that separate otherwise equal prefixes.
        key_managers: plugins that add identity fields.
        layerwise: load and store layer by layer where the engine can.
        load_failure_policy: see ``LoadFailure``.
    """

    chunk_size: int = 256
    save_partial: bool = False
    save_decode: bool = False
    min_retrieve_tokens: int = 0
    min_store_tokens: int = 0
    max_tokens_per_load: int | None = None
    verify_hot: VerifyHot = VerifyHot.SAMPLE
    exact: bool = False
    quality: Quality = Quality.WARN
    quality_kl: float = 0.02
    quality_report: str = ""
    tags_in_key: tuple[str, ...] = ()
    key_managers: Annotated[tuple[PluginChoice, ...], "key_managers"] = ()
    layerwise: bool = False
    load_failure_policy: LoadFailure = LoadFailure.RECOMPUTE

    def __post_init__(self) -> None:
        least = {"chunk_size": 1, "min_retrieve_tokens": 0, "min_store_tokens": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} must be at least {bound}, not {getattr(self, name)}")
        if self.max_tokens_per_load is not None and self.max_tokens_per_load < 1:
            raise ValueError(
                f"max_tokens_per_load must be at least 1, not {self.max_tokens_per_load}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerConfig:
    """Shares of resident memory, and the cost gate.

    Attributes:
        clean_reserve: kept free or clean by writing ahead.
        dirty_cap: most memory waiting to be written back.
        offers: most memory leased to requests that have not started.
        prefetch: most memory for chunks on their way up.
        quarantine: most memory held back for one vanished client.
        cost_gate: skip loads and stores that cost more than computing.
        lookup_budget: most time for asking remote tiers, as a share of the predicted prefill.
        close_timeout: ``aclose`` gives up on a hung tier after this long.
    """

    clean_reserve: Share = Share(0.05)
    dirty_cap: Share = Share(0.25)
    offers: Share = Share(0.5)
    prefetch: Share = Share(0.25)
    quarantine: Share = Share(0.25)
    cost_gate: bool = True
    lookup_budget: Share = Share(0.05)
    close_timeout: Duration = Duration(10.0)


class Transfer(Enum):
    """How values travel between an engine and the daemon."""

    AUTO = "auto"
    """In the daemon's own memory where it can be mapped, else over the connection."""
    SHM = "shm"
    TCP = "tcp"


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """The daemon that has the cache; without one of the first three it is in this process.

    Attributes:
        host, port: TCP; on this node it only names the unix socket.
        socket: path of the unix socket.
        private: one for engines of this user with this configuration, started when it is not there.
        token: for daemons of other users and nodes.
        ca: file with the certificates (PEM) to trust; asks for TLS, as ``host: tls://...`` does.
        timeout: longest wait for a call without a deadline.
        transfer: see ``Transfer``.
        grace: a private one ends this long after its last client.
        workers: of this engine on this node; memory of a private one is per worker.
    """

    host: str = ""
    port: int = 5555
    socket: str = ""
    private: bool = False
    token: Secret = Secret("")
    ca: str = ""
    timeout: Duration = Duration(1.0)
    transfer: Transfer = Transfer.AUTO
    grace: Duration = Duration(30.0)
    workers: int = 1

    def __post_init__(self) -> None:
        if sum(map(bool, (self.host, self.socket, self.private))) > 1:
            raise ValueError("host, socket and private are three ways to one daemon; keep one")
        if not 0 < self.port < 1 << 16:
            raise ValueError(f"port is 1 to 65535, not {self.port}")

    @property
    def address(self) -> str:
        """Where it is, or ``""``."""
        if self.socket:
            return f"unix://{self.socket}"
        if self.ca:
            return f"tls://{self.host.removeprefix('tls://')}:{self.port}?ca={self.ca}"
        return f"{self.host}:{self.port}" if self.host else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything. Tiers in lookup order."""

    engine: EngineConfig = EngineConfig()
    tiers: tuple[TierConfig, ...] = ()
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)
    plugins: PluginsConfig = PluginsConfig()
    manager: ManagerConfig = ManagerConfig()
    daemon: DaemonConfig = DaemonConfig()
    observers: Annotated[tuple[PluginChoice, ...], "observers"] = ()
    log_level: Literal["debug", "info", "warning", "error"] = "info"
