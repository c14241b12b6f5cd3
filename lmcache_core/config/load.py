"""Where configuration comes from, and in which order: each later source wins, key by key.

Defaults, the YAML file (``LMCACHE_CONFIG_FILE``), the environment (``LMCACHE_*``), the engine's extra
configuration (``lmcache.*``), flags. ``__`` in an environment name, a dot elsewhere, leads into a mapping.
A list of tiers replaces the list of an earlier source; ``tiers.NAME.KEY`` changes one key of one tier.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from lmcache_core.config.binding import Setting, bind, convert, join, table
from lmcache_core.config.expansion import TIER_KEYS, Tree, expand, from_block, rename
from lmcache_core.config.names import BY_KEY, NOT_SETTINGS, NOT_SETTINGS_PREFIXES
from lmcache_core.config.records import (
    Config,
    EngineConfig,
    ManagerConfig,
    PluginChoice,
    PluginsConfig,
    TenantConfig,
    TierConfig,
)  # fmt: skip
from lmcache_core.config.tree import Item, items, merge, nest, read_yaml, refuse, reread
from lmcache_core.registry import Registry
from lmcache_core.spi import ConfigError, PluginError, TensorSerde

PREFIX = "LMCACHE_"
FILE_VARIABLE = "LMCACHE_CONFIG_FILE"
LOG_LEVELS = Literal["debug", "info", "warning", "error"]
_SERVICE_LINK = re.compile(r".*_(port(_\d+_(tcp|udp)(_\w+)?)?|service_(host|port\w*))")
_SECTIONS = ("tiers", "tenants", "plugins", "manager", "observers", "key_managers", "log_level")
_OF_TIER = tuple(
    f.name for f in fields(TierConfig) if f.name not in ("plugin", "options", "policy_options")
)
_HINTS = {
    **{name: f"it belongs to a tier: tiers: [{{PLUGIN: {{{name}: ...}}}}]" for name in _OF_TIER},
    **{f.name: f"did you mean manager.{f.name}?" for f in fields(ManagerConfig)},
    **{f.name: f"did you mean plugins.{f.name}?" for f in fields(PluginsConfig)},
    "engine": "its keys stand at the top level",
    "enabled": "did you mean 'enable'?",
}
_HINTS_IN_TIER = {f.name: "it belongs at the top level" for f in fields(EngineConfig)}


@dataclass(frozen=True, slots=True)
class Effective:
    """A configuration with its provenance.

    Attributes:
        settings: every effective value and where it came from, in the order of the records.
        notes: what was accepted without effect, one line each.
        registry: the plugins under this configuration's permissions.
    """

    config: Config
    settings: tuple[Setting, ...]
    notes: tuple[str, ...]
    registry: Registry


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
    tree, tiers, changes = _gather(_sources(path, env, engine or {}, flags or {}, notes), notes)
    settings: list[Setting] = []
    short = {key: tree.pop(key) for key in TIER_KEYS if key in tree}
    sections = {key: tree.pop(key) for key in _SECTIONS if key in tree}
    none = Item({}, "default")

    heads: list[Setting] = []
    plugins = bind(PluginsConfig, sections.get("plugins", none), "plugins", heads)
    if registry is None:
        registry = _registry(plugins, env)
    binder = _Binder(registry, settings)
    managers = binder.choices("key_managers", sections.get("key_managers"), "key_managers")
    valid = (*_SECTIONS, *(key for key in BY_KEY))
    engine_config = bind(
        EngineConfig, Item(tree, "configuration"), "", settings,
        given={"key_managers": managers}, also=valid, hints=_HINTS,
    )  # fmt: skip
    config = Config(
        engine=engine_config,
        tiers=binder.tiers(_tier_items(tiers, short, changes, registry, notes)),
        tenants=convert(
            Mapping[str, TenantConfig], sections.get("tenants", none), "tenants", settings
        ),
        manager=bind(ManagerConfig, sections.get("manager", none), "manager", settings),
        plugins=plugins,
        observers=binder.choices("observers", sections.get("observers"), "observers"),
        log_level=convert(
            LOG_LEVELS, sections.get("log_level", Item("info", "default")), "log_level", settings
        ),
    )
    binder.check(engine_config)
    return Effective(config, (*settings, *heads), tuple(notes), registry)


def permissions(
    path: str | os.PathLike[str] | None = None, /, *, env: Mapping[str, str] = os.environ
) -> Registry:
    """The registry under the permissions that the configuration gives; nothing else of it is bound."""
    tree, _, _ = _gather(_sources(path, env, {}, {}, []), [])
    return _registry(
        bind(PluginsConfig, tree.get("plugins", Item({}, "default")), "plugins", []), env
    )


def _registry(plugins: PluginsConfig, env: Mapping[str, str]) -> Registry:
    return Registry(
        allow=plugins.allow, deny=plugins.deny, allow_paths=plugins.allow_paths, environment=env
    )


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
        yield _file(
            os.fspath(named), "" if path is not None else f"{FILE_VARIABLE} names ", env, notes
        )
    for name in sorted(env):
        key = name.removeprefix(PREFIX).lower()
        if name.startswith(PREFIX) and not _not_a_setting(key, env[name]):
            yield nest(key.replace("__", "."), Item(env[name], f"environment {name}", text=True))
    for name in sorted(engine):
        if name.startswith("lmcache."):
            item = items(engine[name], f"engine {name}", text=True)
            yield nest(name.removeprefix("lmcache."), item)
    for name in sorted(flags):
        yield nest(name, items(flags[name], f"flag {name}", text=True))


def _file(name: str, why: str, env: Mapping[str, str], notes: list[str]) -> Tree:
    try:
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
        found = [_one_key(item, f"tiers[{index}]") for index, item in enumerate(tiers.value)]
    for change in changes:
        for wanted, options in change.value.items():
            names = [_name_of(item) for item in found]
            if wanted not in names:
                raise refuse(
                    options,
                    f"tiers.{wanted}",
                    f"no such tier; there are: {', '.join(names) or 'none'}",
                )
            item = found[names.index(wanted)]
            ((plugin, old),) = item.value.items()
            changed = merge(table(old, wanted), table(options, f"tiers.{wanted}"))
            found[names.index(wanted)] = Item({plugin: Item(changed, old.origin)}, item.origin)
    return found


def _one_key(item: Item, path: str) -> Item:
    """``NAME`` or ``{NAME: {options}}`` as the latter."""
    value = reread(item).value
    if isinstance(value, str):
        return Item({value: Item({}, item.origin)}, item.origin)
    if not isinstance(value, dict) or len(value) != 1:
        got = f"the keys {', '.join(value)}" if isinstance(value, dict) else "something else"
        raise refuse(
            item,
            path,
            f"expected one mapping NAME: {{options}}, got {got} (options are indented further)",
        )
    return Item(value, item.origin)


def _name_of(item: Item) -> str:
    ((plugin, options),) = item.value.items()
    given = table(options, plugin).get("name")
    if given is not None:
        return str(convert(str, given, join(plugin, "name"), []))
    name: str = plugin.partition("@")[0].rpartition(":")[2]
    return name


class _Binder:
    """Binds what needs a plugin's class."""

    def __init__(self, registry: Registry, settings: list[Setting]) -> None:
        self.registry = registry
        self.settings = settings
        self.lossy: list[tuple[Item, str]] = []

    def plugin(self, kind: str, name: str, item: Item, path: str) -> Any:
        try:
            return self.registry.load(kind, name, anyway=True)
        except PluginError as error:
            raise type(error)(f"{item.origin}: {path}: {error}") from error

    def choice(self, kind: str, item: Item, path: str) -> tuple[PluginChoice, Any]:
        item = _one_key(item, path)
        ((name, options),) = item.value.items()
        found = self.plugin(kind, name, item, path)
        self.settings.append(Setting(path, name, item.origin))
        bound = bind(found.config_type, options, join(path, name), self.settings)
        return PluginChoice(name=name, options=bound), found

    def choices(self, kind: str, item: Item | None, path: str) -> tuple[PluginChoice, ...]:
        return tuple(choice for choice, _ in self._list(kind, item, path))

    def _list(self, kind: str, item: Item | None, path: str) -> list[tuple[PluginChoice, Any]]:
        if item is None:
            self.settings.append(Setting(path, [], "default"))
            return []
        value = reread(item).value
        parts = value if isinstance(value, list) else [item]
        return [self.choice(kind, part, f"{path}[{index}]") for index, part in enumerate(parts)]

    def tiers(self, found: list[Item]) -> tuple[TierConfig, ...]:
        bound: dict[str, TierConfig] = {}
        for item in found:
            tier = self.tier(item)
            if tier.name in bound:
                raise refuse(
                    item,
                    f"tiers.{tier.name}",
                    "two tiers of one name; give one of them `name: ...`",
                )
            bound[tier.name] = tier
        return tuple(bound.values())

    def tier(self, item: Item) -> TierConfig:
        ((plugin, written),) = item.value.items()
        name = _name_of(item)
        path = f"tiers.{name}"
        backend = self.plugin("backends", plugin, item, path)
        options = table(written, path)
        self.settings.append(Setting(f"{path}.plugin", plugin, item.origin))
        given: dict[str, Any] = {"plugin": plugin, "name": name}
        # A key that both know, such as size, is written once and goes to both.
        theirs = {f.name for f in fields(backend.config_type)}
        inner: list[Setting] = []
        given["options"] = bind(
            backend.config_type,
            Item({k: v for k, v in options.items() if k in theirs or k not in _OF_TIER}, written.origin),
            path, inner, also=_OF_TIER, hints=_HINTS_IN_TIER,
        )  # fmt: skip
        mine = {f"{path}.{name}" for name in _OF_TIER}
        self.settings += [setting for setting in inner if setting.path not in mine]
        own = {k: v for k, v in options.items() if k in _OF_TIER and k != "name"}
        given["policy_options"] = None
        if (policy := own.pop("policy", None)) is not None:
            choice, _ = self.choice("policies", policy, f"{path}.policy")
            given["policy"], given["policy_options"] = choice.name, choice.options
        given["serde"] = self.serdes(own.pop("serde", None), f"{path}.serde")
        wrappers = own.pop("wrappers", Item({}, "default"))
        given["wrappers"] = {}
        for key, part in table(wrappers, f"{path}.wrappers").items():
            kind = self.plugin("wrappers", key, part, f"{path}.wrappers.{key}").config_type
            if reread(part).value is False:  # one that is there unasked is left out
                given["wrappers"][key] = False
                self.settings.append(Setting(f"{path}.wrappers.{key}", False, part.origin))
            else:
                given["wrappers"][key] = bind(kind, part, f"{path}.wrappers.{key}", self.settings)
        return bind(TierConfig, Item(own, written.origin), path, self.settings, given=given)

    def serdes(self, item: Item | None, path: str) -> tuple[PluginChoice, ...]:
        found = self._list("serdes", item, path)
        for index, (choice, serde) in enumerate(found):
            assert item is not None
            if index and issubclass(serde, TensorSerde):
                raise refuse(item, path, f"{choice.name!r} understands tensors and must come first")
            if not serde.lossless:
                self.lossy.append((item, f"{path}[{index}]: {choice.name!r}"))
        return tuple(choice for choice, _ in found)

    def check(self, engine: EngineConfig) -> None:
        if engine.exact and self.lossy:
            item, where = self.lossy[0]
            raise ConfigError(f"{item.origin}: {where} is lossy, and exact: true forbids that")
