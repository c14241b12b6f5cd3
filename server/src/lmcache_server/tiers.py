"""Lower tiers that come, change and go while the daemon serves."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from lmcache_core.config import Config, TierConfig
from lmcache_core.spi import ConfigError, PluginError
from lmcache_core.storage.build import fidelity
from lmcache_core.storage.tier import Tier

if TYPE_CHECKING:
    from lmcache_server.daemon import Daemon

FIXED = ("manager", "plugins")
"""Sections under which tiers were made, as they were under the engine's keys; where one has changed, tiers do not."""


async def remove(daemon: Daemon, name: str, deadline: float) -> None:
    """Stop serving from a tier, until it is restored.

    Raises:
        ConfigError: there is none of this name.
    """
    async with daemon.tiering:
        await _remove(daemon, name, deadline)


async def restore(daemon: Daemon, name: str) -> None:
    """Serve again from a configured tier that was removed, where it stood.

    Raises:
        ConfigError: none is configured, it is in use, or cannot work here.
    """
    async with daemon.tiering:
        _, lower = daemon.builder.parted(daemon.builder.config.tiers)
        known = {each.name: each for each in lower}
        if name not in known:
            names = ", ".join(known) or "none"
            raise ConfigError(f"no lower tier {name!r} is configured; there are: {names}")
        if name in _serving(daemon):
            raise ConfigError(f"tier {name!r} is in use already")
        await _add(daemon, daemon.builder.tier(known[name]), [*known])


async def follow(daemon: Daemon, config: Config, /) -> None:
    """Serve from the lower tiers that a configuration names, with its options and limits, and from no others.

    A tier that stays as it was is not touched. One that changes is written out and closed before it opens again: its
    values are those of its store. One that was removed by an operator stays so, and is restored as it is written now.

    Raises:
        ConfigError, PluginError: what tiers are made under would change, or one cannot be made: none has changed. Or some cannot
            open: those serve on as they were, the others as they are written now.
    """
    async with daemon.tiering:
        builder, old = daemon.builder, daemon.builder.config
        resident, before = builder.parted(old.tiers)
        later, after = builder.parted(config.tiers)
        fixed = [name for name in FIXED if getattr(old, name) != getattr(config, name)]
        fixed += [
            each.name
            for each in fields(config.engine)
            if getattr(old.engine, each.name) != getattr(config.engine, each.name)
        ]
        if resident != later:
            fixed.append("the tier in memory")
        if fidelity(old, builder.registry) != fidelity(config, builder.registry):
            fixed.append("what values lose")
        if fixed:
            raise ConfigError(f"a restart is needed for {', '.join(fixed)}")
        kept, names = {each.name: each for each in before}, [each.name for each in after]
        made = {
            each.name: builder.tier(each) for each in after if _other(kept.get(each.name), each)
        }
        serving, until = _serving(daemon), daemon.now() + config.manager.close_timeout
        for name in serving:
            if name in made or name not in names:
                await _remove(daemon, name, until)
        now, problems = {each.name: each for each in after}, []
        for name, tier in made.items():
            if name in kept and name not in serving:
                continue
            try:
                await _add(daemon, tier, names)
            except (ConfigError, PluginError) as error:
                problems.append(str(error))
                del now[name]
                if name in kept:
                    with suppress(ConfigError, PluginError):
                        await _add(daemon, builder.tier(kept[name]), names)
                        now[name] = kept[name]
        for name in _serving(daemon):
            tier, size = daemon.manager.tier(name), now[name].size
            if size is not None and tier.holdings is not None:
                daemon.work(daemon.manager.set_limit(name, int(size)))
        daemon.manager.tiers.sort(key=lambda tier: names.index(tier.name))
        first = () if later is None else (later,)
        lower = [now[name] for name in names if name in now]
        builder.config = replace(config, tiers=(*first, *lower))
        if problems:
            raise ConfigError("; ".join(problems))


def _serving(daemon: Daemon) -> list[str]:
    return [tier.name for tier in daemon.manager.tiers]


def _other(before: TierConfig | None, after: TierConfig) -> bool:
    """Whether a tier has to begin anew; a limit changes without."""
    return before is None or replace(before, size=None) != replace(after, size=None)


async def _add(daemon: Daemon, tier: Tier, names: Sequence[str]) -> None:
    """Open a tier in its place among those of these names."""
    before = names[: names.index(tier.name)]
    position = sum(each in before for each in _serving(daemon))
    await daemon.manager.add_tier(tier, position=position)


async def _remove(daemon: Daemon, name: str, deadline: float) -> None:
    left = await daemon.manager.remove_tier(name, deadline=deadline)
    for tier, trouble in left.errors.items():
        daemon.log.warning("tier %s is closed: %s", tier, trouble)
