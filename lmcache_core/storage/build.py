"""From configuration records to an open storage manager."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from lmcache_core.clock import SystemClock
from lmcache_core.config import Config, PluginChoice, Share, TierConfig
from lmcache_core.files import OsFiles
from lmcache_core.identity.space import APPROXIMATE, EXACT
from lmcache_core.memory.arena import Access, Arena
from lmcache_core.memory.pool import Pool
from lmcache_core.observers import Metrics
from lmcache_core.registry import Registry
from lmcache_core.spi import (
    AbstractBackend,
    ByteSize,
    Capabilities,
    ConfigError,
    Context,
    Event,
    EvictionPolicy,
    HealthChanged,
    MemoryOptions,
    PluginError,
    Recoded,
    ResidentPool,
    SerdeOff,
)
from lmcache_core.storage.feed import Feed
from lmcache_core.storage.manager import StorageManager
from lmcache_core.storage.tier import Tier
from lmcache_core.threads import DaemonExecutor
from lmcache_core.wrappers import (
    ORDER,
    Breaker,
    BreakerOptions,
    Chain,
    Chaos,
    Check,
    CheckOptions,
    Encoded,
    Ladder,
    LadderOptions,
    Limit,
    LimitOptions,
    Measured,
    Retried,
    Retry,
    RetryOptions,
    Serde,
)

STAGING = ByteSize(256 << 20)
"""Resident memory when no tier provides it: enough to carry values to and from the other tiers."""
WRAPPERS: Mapping[str, tuple[Any, Any]] = {
    "limit": (Limit, LimitOptions()),
    "breaker": (Breaker, BreakerOptions()),
    "retry": (Retry, RetryOptions()),
    "check": (Check, CheckOptions()),
    "chaos": (Chaos, None),
}
"""Wrappers of the core by name, with the options they have unasked; None keeps one off."""
BREAKER_STATES = {"closed": 0, "half open": 1, "open": 2}


def fidelity(config: Config, registry: Registry, /) -> str:
    """``"exact"``, or ``approx:`` and the lossy serdes of all tiers with the options that were chosen."""
    lossy = set()
    for choice in (each for tier in config.tiers for chain in tier.chains for each in chain):
        found = registry.load("serdes", choice.name)
        if not found.lossless:
            lossy.add(label(choice.name, _options(found, choice.options)))
    return APPROXIMATE + "+".join(sorted(lossy)) if lossy else EXACT


def label(name: str, options: Any, /) -> str:
    """A serde and those of its options that differ from its defaults: what decides what it loses."""
    plain = type(options)()
    chosen = [
        f"{field.name}={value}"
        for field in fields(options)
        if (value := getattr(options, field.name)) != getattr(plain, field.name)
    ]
    return f"{name}({','.join(chosen)})" if chosen else name


def default_context(name: str, emit: Callable[[Event], None] = lambda event: None, /) -> Context:
    """The real world for one tier: clocks, threads of its own, the operating system's files."""

    def no_pool(options: MemoryOptions, /) -> ResidentPool:
        raise ConfigError(f"tier {name!r} is not resident and gets no pool")

    return Context(
        tier=name,
        clock=SystemClock(),
        random=random.Random(),
        log=logging.getLogger(f"lmcache.tier.{name}"),
        executor=DaemonExecutor(f"lmcache-{name}"),
        files=OsFiles(),
        emit=emit,
        create_pool=no_pool,
    )


async def build(
    config: Config,
    registry: Registry,
    /,
    *,
    metrics: Metrics | None = None,
    context: Callable[[str], Context] = default_context,
    access: Access = Access.OWNER,
    overcommit: bool = False,
) -> StorageManager:
    """Load the plugins, make the tiers and open them, in the running loop.

    Args:
        context: makes the world of a tier; what it emits is counted and passed on.
        access: which other processes may write into resident memory.
        overcommit: allow more of it than the machine has.

    Raises:
        ConfigError: a tier cannot work as configured.
        PluginError: a plugin cannot be used.
    """
    builder = Builder(config, registry, metrics or Metrics(), context)
    builder.access, builder.overcommit = access, overcommit
    return await builder.build()


class Builder:
    """Makes tiers of one configuration; kept by whoever adds tiers later."""

    def __init__(
        self,
        config: Config,
        registry: Registry,
        metrics: Metrics,
        context: Callable[[str], Context],
        /,
    ) -> None:
        self.config = config
        self.registry = registry
        self.metrics = metrics
        self.access = Access.OWNER
        self.feed: Feed | None = None
        self.overcommit = False
        self._context = context
        self._manager: StorageManager | None = None

    async def build(self) -> StorageManager:
        """See the module's ``build``."""
        resident, lower = self.parted(self.config.tiers)
        tiers = [self.tier(each) for each in lower]
        context = self.context(resident.name if resident else "staging")
        backend: AbstractBackend | None = None
        if resident is None:
            pool = self.pool(context, None, MemoryOptions())
        else:
            made: list[Pool] = []

            def create_pool(options: MemoryOptions, /) -> Pool:
                made.append(self.pool(context, resident, options))
                return made[-1]

            world = replace(context, create_pool=create_pool)
            backend = self.backend(resident, world)
            await backend.open()
            if not made:
                raise ConfigError(
                    f"tier {resident.name!r} made no pool: {resident.plugin} is broken"
                )
            pool = made[0]
        self._manager = StorageManager(
            pool, tiers, context=context, config=self.config, metrics=self.metrics,
            resident=backend, feed=self.feed,
        )  # fmt: skip
        await self._manager.open()
        return self._manager

    def parted(self, tiers: Sequence[TierConfig], /) -> tuple[TierConfig | None, list[TierConfig]]:
        """The resident one of some tiers, and those below it.

        Raises:
            ConfigError: two tiers have one name, or the resident one is not where or what it can be.
        """
        names = [tier.name for tier in tiers]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"two tiers are named {min(twice)!r}; give one of them another name")
        resident, lower = None, []
        for position, tier in enumerate(tiers):
            if not self.is_resident(tier):
                lower.append(tier)
            elif position:
                raise ConfigError(
                    f"tier {tier.name!r} holds values in memory where they are used: write it first, and once"
                )
            elif tier.chains:
                raise ConfigError(
                    f"tier {tier.name!r} holds values where they are used, so nothing can be encoded there: "
                    "give the serde to a tier below"
                )
            else:
                resident = tier
        return resident, lower

    def is_resident(self, tier: TierConfig, /) -> bool:
        """Whether a tier is the one that values are used in."""
        found = self.registry.load("backends", tier.plugin)
        return bool(getattr(found, "capabilities", Capabilities()).resident)

    def tier(self, config: TierConfig, /) -> Tier:
        """A lower tier with its wrappers, not yet opened. A plugin's option ``threads`` sizes its pool."""
        context = self.context(config.name)
        threads = getattr(config.options, "threads", None)
        if threads is not None and isinstance(context.executor, DaemonExecutor):
            executor = DaemonExecutor(context.executor.owner, threads)
            context = replace(context, executor=executor)
        backend = self.wrap(config, self.backend(config, context), context)
        return Tier(
            config,
            backend,
            context=context,
            policy=lambda limit: self.policy(config, limit),
            quota=lambda tenant, limit: self.quota(config, tenant, limit),
            metrics=self.metrics,
        )

    def backend(self, config: TierConfig, context: Context, /) -> AbstractBackend:
        found = self.registry.load("backends", config.plugin)
        backend: AbstractBackend = found(_options(found, config.options), context)
        return backend

    def wrap(
        self, config: TierConfig, backend: AbstractBackend, context: Context, /
    ) -> AbstractBackend:
        """Put the wrappers around a backend: ``ORDER``, other plugins' right below the counting.

        Raises:
            ConfigError: a lossy serde although the engine's values are exact.
        """
        wanted = dict(config.wrappers)
        layers: dict[str, Callable[[AbstractBackend], AbstractBackend]] = {}
        for name, (core, default) in WRAPPERS.items():
            options = wanted.pop(name, default)
            if options is not None and options is not False:
                layers[name] = lambda inner, core=core, options=options: core(
                    options, context, inner
                )  # type: ignore[misc]
        chains = tuple(self.chain(config, chain) for chain in config.chains)
        if config.ladder:
            levels = LadderOptions(levels=chains, target=config.ladder_target)
            layers["serde"] = lambda inner: Ladder(levels, context, inner)
        elif chains:
            layers["serde"] = lambda inner: Encoded(chains[0], context, inner)
        for name in reversed(ORDER):
            if name in layers:
                backend = layers[name](backend)
        for name, options in wanted.items():
            found = self.registry.load("wrappers", name)
            backend = found(_options(found, options), context, backend)
        return Measured(self.metrics, context, backend)

    def chain(self, config: TierConfig, choices: Sequence[PluginChoice], /) -> Chain:
        """Some serdes of a tier."""
        serdes = []
        for choice in choices:
            found = self.registry.load("serdes", choice.name)
            if self.config.engine.exact and not found.lossless:
                raise ConfigError(
                    f"tier {config.name!r}: serde {choice.name!r} is lossy ({found.error_bound or 'unbounded'}), "
                    "and the engine is exact; remove one of the two"
                )
            serdes.append(found(_options(found, choice.options)))
        return Chain(serdes=tuple(serdes), find=self.reader_of)

    def reader_of(self, wire_id: str, /) -> Serde | None:
        """A serde named like its wire id, for what an earlier configuration wrote."""
        try:
            found = self.registry.load("serdes", wire_id)
            reader: Serde = found(found.config_type())
        except (PluginError, ConfigError, TypeError):  # none here, or it cannot be without options
            return None
        return reader if reader.wire_id == wire_id else None

    def policy(self, config: TierConfig | None, limit: int, /) -> EvictionPolicy:
        found = self.registry.load("policies", config.policy if config else "lru")
        policy: EvictionPolicy = found(
            _options(found, config.policy_options if config else None), limit
        )
        return policy

    def quota(self, config: TierConfig | None, tenant: str, limit: int, /) -> int | None:
        """Bytes a tenant may hold in a tier of ``limit`` bytes."""
        tenants = {name: each.quota for name, each in self.config.tenants.items()}
        for quotas in (config.quotas if config else {}, tenants):
            quota = quotas.get(tenant, quotas.get("default"))
            if quota is not None:
                return int(limit * quota) if isinstance(quota, Share) else int(quota)
        return None

    def pool(self, context: Context, config: TierConfig | None, options: MemoryOptions, /) -> Pool:
        """Resident memory: of the tier, or a small one."""
        size = STAGING if config is None else config.size
        if size is None:
            raise ConfigError(f"tier {context.tier!r} needs a size, such as size: 20GiB")
        shares = self.config.manager
        names = {*self.config.tenants, *(config.quotas if config else ())}
        quotas = {
            name: quota for name in names if (quota := self.quota(config, name, size)) is not None
        }

        def evicted(keys: Any, nbytes: int) -> None:
            if self._manager is not None:
                self._manager.evicted(keys, nbytes)

        return Pool(
            Arena(size, options, access=self.access, overcommit=self.overcommit, log=context.log),
            self.policy(config, size),
            quotas=quotas,
            default_quota=self.quota(config, "", size),
            dirty_share=shares.dirty_cap,
            clean_share=shares.clean_reserve,
            quarantine_share=shares.quarantine,
            now=context.clock.now,
            on_evict=evicted,
        )

    def context(self, name: str, /) -> Context:
        """The world of a tier, with its events counted on the way."""
        context = self._context(name)
        emit, metrics = context.emit, self.metrics

        def counting(event: Event, /) -> None:
            if isinstance(event, HealthChanged):
                metrics.set("lmcache_tier_breaker", BREAKER_STATES[event.state], tier=event.tier)
                if event.state == "open":
                    metrics.add("lmcache_tier_breaker_opened_total", tier=event.tier)
            elif isinstance(event, Retried):
                metrics.add("lmcache_tier_retries_total", tier=event.tier, verb=event.verb)
            elif isinstance(event, Recoded):
                labels = {"tier": event.tier, "verb": event.verb, "chain": event.chain}
                metrics.add("lmcache_tier_serde_raw_bytes_total", event.raw, **labels)
                metrics.add("lmcache_tier_serde_stored_bytes_total", event.stored, **labels)
                metrics.add("lmcache_tier_serde_seconds_total", event.seconds, **labels)
            elif isinstance(event, SerdeOff):
                metrics.add("lmcache_tier_serdes_off_total", tier=event.tier, serde=event.serde)
            emit(event)

        return replace(context, emit=counting)


def _options(found: Any, options: object) -> Any:
    return found.config_type() if options is None else options
