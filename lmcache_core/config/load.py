"""Where configuration comes from, and in which order: each later source wins, key by key.

Defaults, the YAML file (``LMCACHE_CONFIG_FILE``), the environment (``LMCACHE_*``), the engine's extra
configuration (``lmcache.*``), flags. ``__`` in an environment name, a dot elsewhere, leads into a mapping.
A list of tiers replaces the list of an earlier source; ``tiers.NAME.KEY`` changes one key of one tier.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lmcache_core.config.binding import Binder, Setting, join, one_key, table
from lmcache_core.config.expansion import TIER_KEYS, Tree, expand, from_block, rename
from lmcache_core.config.names import BY_KEY, NOT_SETTINGS, NOT_SETTINGS_PREFIXES
from lmcache_core.config.records import (
    Config,
    EngineConfig,
    ManagerConfig,
    PluginsConfig,
    TierConfig,
)
from lmcache_core.config.tree import NONE, Item, items, merge, nest, read_yaml, refuse, reread
from lmcache_core.registry import Registry
from lmcache_core.spi import ConfigError, TensorSerde

PREFIX = "LMCACHE_"
FILE_VARIABLE = "LMCACHE_CONFIG_FILE"
_SERVICE_LINK = re.compile(r".*_(port(_\d+_(tcp|udp)(_\w+)?)?|service_(host|port\w*))")
_SECTIONS = ("tenants", "manager", "daemon", "observers", "log_level")
_OF_TIER = tuple(
    f.name for f in fields(TierConfig) if f.name not in ("plugin", "options", "policy_options")
)
_HINTS = {
    **{name: f"did you mean {name!r}?" for name in ("tiers", "plugins", *_SECTIONS, *BY_KEY)},
    **{name: f"it belongs to a tier: tiers: [{{PLUGIN: {{{name}: ...}}}}]" for name in _OF_TIER},
    **{f.name: f"did you mean manager.{f.name}?" for f in fields(ManagerConfig)},
    **{f.name: f"did you mean plugins.{f.name}?" for f in fields(PluginsConfig)},
    "engine": "its keys stand at the top level",
    "enabled": "did you mean 'enable'?",
}
_HINTS_IN_TIER = {
    **{f.name: "it belongs at the top level" for f in fields(EngineConfig)},
    **{name: f"did you mean {name!r}?" for name in _OF_TIER},
}


@dataclass(frozen=True, slots=True)
class Effective:
    """A configuration with its provenance.

    Attributes:
        settings: every effective value and where it came from, in the order of the records.
        notes: what was accepted without effect, one line each.
        registry: the plugins under this configuration's permissions.
        path: the configuration file that was given, absolute.
        given: what was given besides it and the environment, by dotted key; a private daemon reads the same.
    """

    config: Config
    settings: tuple[Setting, ...]
    notes: tuple[str, ...]
    registry: Registry
    path: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)


def load(
    path: str | os.PathLike[str] | None = None,
    /,
    *,
    env: Mapping[str, str] = os.environ,
    engine: Mapping[str, Any] | None = None,
    flags: Mapping[str, Any] | None = None,
    registry: Registry | None = None,
) -> Effective:
    """Read all sources and bind them.

    Args:
        path: configuration file, instead of the one named in the environment.
        engine: an engine's extra configuration; keys that do not begin with ``lmcache.`` are its own.
        flags: dotted key to written value.
        registry: instead of the one that the configuration's ``plugins`` describes.

    Raises:
        ConfigError: names the source, the key and the nearest valid one.
        PluginError: a named plugin cannot be used.
    """
    notes: list[str] = []
    own = {
        name.removeprefix("lmcache."): value
        for name, value in (engine or {}).items()
        if name.startswith("lmcache.")
    }
    tree, tiers, changes = _gather(_sources(path, env, own, flags or {}, notes), notes)
    binder = Binder()
    plugins = binder.bind(PluginsConfig, tree.pop("plugins", NONE), "plugins")
    binder.registry = registry or Registry(environment=env, **asdict(plugins))
    short = {key: tree.pop(key) for key in TIER_KEYS if key in tree}
    sections = Item({key: tree.pop(key) for key in _SECTIONS if key in tree}, "configuration")
    bound = binder.bind(EngineConfig, Item(tree, "configuration"), "", hints=_HINTS)
    found = _tier_items(tiers, short, changes, binder.registry, notes)
    given = {"engine": bound, "plugins": plugins, "tiers": _tiers(binder, found, bound.exact)}
    config = binder.bind(Config, sections, "", given=given)
    return Effective(
        config, tuple(binder.settings), tuple(notes), binder.registry,
        path=None if path is None else os.path.abspath(path), given={**own, **(flags or {})},
    )  # fmt: skip


def permissions(
    path: str | os.PathLike[str] | None = None, /, *, env: Mapping[str, str] = os.environ
) -> Registry:
    """The registry under the permissions that the configuration gives; nothing else of it is bound."""
    tree, _, _ = _gather(_sources(path, env, {}, {}, []), [])
    plugins = Binder().bind(PluginsConfig, tree.get("plugins", NONE), "plugins")
    return Registry(environment=env, **asdict(plugins))


def _gather(sources: Iterable[Tree], notes: list[str]) -> tuple[Tree, Item | None, list[Item]]:
    """Lay the sources over each other: everything but tiers, the list of tiers, changes to single ones."""
    tree: Tree = {}
    tiers: Item | None = None
    changes: list[Item] = []
    for source in sources:
        renamed = rename(source, notes)
        written = renamed.pop("tiers", None)
        if written is not None:
            fresh = reread(written)
            if isinstance(fresh.value, dict):
                changes.append(fresh)
            else:
                tiers, changes = fresh, []
        tree = merge(tree, renamed)
    return tree, tiers, changes


def _sources(
    path: str | os.PathLike[str] | None,
    env: Mapping[str, str],
    engine: Mapping[str, Any],
    flags: Mapping[str, Any],
    notes: list[str],
) -> Iterator[Tree]:
    named = path if path is not None else env.get(FILE_VARIABLE) or None
    if named is not None:
        why = "" if path is not None else f"{FILE_VARIABLE} names "
        yield _file(os.fspath(named), why, env, notes)
    for name in sorted(env):
        key = name.removeprefix(PREFIX).lower()
        if name.startswith(PREFIX) and not _not_a_setting(key, env[name]):
            yield nest(key.replace("__", "."), Item(env[name], f"environment {name}", text=True))
    for source, written in (("engine lmcache.", engine), ("flag ", flags)):
        for name in sorted(written):
            yield nest(name, items(written[name], f"{source}{name}", text=True))


def _file(name: str, why: str, env: Mapping[str, str], notes: list[str]) -> Tree:
    try:
        # It is read again later, and must not block now.
        if not stat.S_ISREG(os.stat(name).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"{why}{name}: cannot be read: {problem}") from error
    root = read_yaml(text, name, env)
    tree = table(root, "")
    if "lmcache" in tree:
        tree = from_block(tree, notes)
    if (tiers := tree.get("tiers")) is not None and not isinstance(tiers.value, list):
        raise refuse(tiers, "tiers", "expected a list, one item `- PLUGIN: {options}` per tier")
    return tree


def _not_a_setting(key: str, value: str) -> bool:
    """Whether an environment name is read elsewhere, or was put there by a container platform."""
    if key in NOT_SETTINGS or key.startswith(NOT_SETTINGS_PREFIXES):
        return True
    link = value.startswith(("tcp://", "udp://")) or re.search("_(port|service)_", f"_{key}")
    return bool(link) and _SERVICE_LINK.fullmatch(f"_{key}") is not None


def _tier_items(
    tiers: Item | None, short: Tree, changes: list[Item], registry: Registry, notes: list[str]
) -> list[Item]:
    if tiers is None:
        memory = "cpu" if "cpu" in registry.names("backends") else "memory"
        found = expand(short, memory, notes)
    else:
        for key, item in short.items():
            raise refuse(item, key, f"cannot stand beside tiers ({tiers.origin}); write it there")
        if not isinstance(tiers.value, list):
            raise refuse(tiers, "tiers", "expected a list, one item `- PLUGIN: {options}` per tier")
        found = [one_key(item, f"tiers[{index}]") for index, item in enumerate(tiers.value)]
    for change in changes:
        for wanted, options in change.value.items():
            names = [_name_of(item) for item in found]
            if wanted not in names:
                problem = f"no such tier; there are: {', '.join(names) or 'none'}"
                raise refuse(options, f"tiers.{wanted}", problem)
            item = found[names.index(wanted)]
            ((plugin, old),) = item.value.items()
            changed = merge(table(old, wanted), table(options, f"tiers.{wanted}"))
            found[names.index(wanted)] = Item({plugin: Item(changed, old.origin)}, item.origin)
    return found


def _name_of(item: Item) -> str:
    ((plugin, options),) = item.value.items()
    given = table(options, plugin).get("name")
    if given is not None:
        return str(Binder().convert(str, given, join(plugin, "name")))
    name: str = plugin.partition("@")[0].rpartition(":")[2]
    return name


def _tiers(binder: Binder, found: list[Item], exact: bool) -> tuple[TierConfig, ...]:
    bound: dict[str, TierConfig] = {}
    for item in found:
        tier = _tier(binder, item, exact)
        if tier.name in bound:
            problem = "two tiers of one name; give one of them `name: ...`"
            raise refuse(item, f"tiers.{tier.name}", problem)
        bound[tier.name] = tier
    return tuple(bound.values())


def _tier(binder: Binder, item: Item, exact: bool) -> TierConfig:
    ((plugin, written),) = item.value.items()
    name = _name_of(item)
    path = f"tiers.{name}"
    backend = binder.plugin("backends", plugin, item, path)
    options = table(written, path)
    binder.note(f"{path}.plugin", plugin, item.origin)
    # A key that both know, such as size, is written once, goes to both and is noted once.
    known = {f.name for f in fields(backend.config_type)}
    theirs = {k: v for k, v in options.items() if k in known or k not in _OF_TIER}
    ours = {k: v for k, v in options.items() if k in _OF_TIER and k != "name"}
    inner = Binder()
    given: dict[str, Any] = {"plugin": plugin, "name": name, "policy_options": None}
    given["options"] = inner.bind(
        backend.config_type, Item(theirs, written.origin), path, hints=_HINTS_IN_TIER
    )
    both = {f"{path}.{key}" for key in _OF_TIER}
    binder.settings += [setting for setting in inner.settings if setting.path not in both]
    if (policy := ours.pop("policy", None)) is not None:
        choice = binder.choice("policies", policy, f"{path}.policy")
        given["policy"], given["policy_options"] = choice.name, choice.options
    tier = binder.bind(TierConfig, Item(ours, written.origin), path, given=given)
    key = "ladder" if tier.ladder else "serde"
    for level, chain in enumerate(tier.chains):
        where = f"{path}.ladder[{level}]" if tier.ladder else f"{path}.serde"
        for index, choice in enumerate(chain):
            serde, item = binder.plugin("serdes", choice.name, item, path), ours[key]
            if index and issubclass(serde, TensorSerde):
                problem = f"{choice.name!r} understands tensors and must come first"
                raise refuse(item, where, problem)
            if exact and not serde.lossless:
                problem = f"{choice.name!r} is lossy, and exact: true forbids that"
                raise refuse(item, f"{where}[{index}]", problem)
    return tier
