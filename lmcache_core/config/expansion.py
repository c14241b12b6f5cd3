"""Short forms to the one grammar: known names of LMCache, and the ``lmcache:`` block of an engine's file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar
from urllib.parse import urlsplit

from lmcache_core.config.binding import Binder, table
from lmcache_core.config.names import BY_KEY, EXTRA_NOTHING, NAMES, SCHEMES, Effect
from lmcache_core.config.tree import Item, merge, nest, refuse, reread
from lmcache_core.spi import ByteSize

V = TypeVar("V")
Tree = dict[str, Item]
TIER_KEYS = tuple(
    row.key for row in NAMES if row.effect is Effect.MAPPED and (" " in row.to or not row.to)
)
"""Names that become tiers or parts of them."""
DEFAULT_SIZE = ByteSize(5 * 2**30)
OFF: tuple[object, ...] = (None, False, 0, "", "None", [], {})


def rename(tree: Mapping[str, Item], notes: list[str], /) -> Tree:
    """Put the names of here in place of known names, in one source; note those without effect.

    Raises:
        ConfigError: a refused name, or a setting under two names.
    """
    renamed: Tree = {}
    for key, item in tree.items():
        row = BY_KEY.get(key)
        target = key
        if key == "policy" and item.value == "exact":
            target, item = "exact", Item(True, item.origin)
        elif row is None:
            pass
        elif row.effect is Effect.NOTHING:
            notes.append(f"{item.origin}: {key} has no effect: {row.why}")
            continue
        elif row.effect is Effect.ELSEWHERE:
            continue
        elif row.effect is Effect.REFUSED:
            if reread(item).plain() in OFF:
                continue
            raise refuse(item, key, f"not supported: {row.why}")
        elif row.effect is Effect.MAPPED and key not in TIER_KEYS:
            target = row.to
        if target in renamed or (target != key and target in tree):
            raise refuse(
                item, key, f"is the same setting as {target}, which is given too; keep one"
            )
        if "." in target:
            renamed = merge(renamed, nest(target, item))
        else:
            renamed[target] = item
    return renamed


def from_block(file: Mapping[str, Item], notes: list[str], /) -> Tree:
    """Read the ``lmcache:`` block of a file whose other keys belong to an engine."""
    block = file["lmcache"]
    inside: Tree = dict(table(block, "lmcache"))
    for key in ("tiers", "tenants", "manager", "chunk_size", *TIER_KEYS):
        if key in file:
            raise refuse(
                file[key],
                key,
                f"would be ignored beside the lmcache: block; move it inside ({block.origin})",
            )
    enable = inside.pop("enable", None)
    if enable is not None and not _value(bool, enable, "lmcache.enable"):
        return {"tiers": Item([], enable.origin)}
    tiers: list[Item] = []
    if (backend := inside.pop("backend", None)) is not None:
        options = dict(table(backend, "lmcache.backend"))
        if "policy" in inside:
            options["policy"] = inside.pop("policy")
        tiers.append(_typed(backend, options, "lmcache.backend"))
    elif "policy" in inside:
        inside["cache_policy"] = inside.pop("policy")
    if (peers := inside.pop("peer_to_peer", None)) is not None:
        options = dict(table(peers, "lmcache.peer_to_peer"))
        on = options.pop("enable", None)
        if on is None or _value(bool, on, "lmcache.peer_to_peer.enable"):
            tiers.append(Item({"p2p": Item(options, peers.origin)}, peers.origin))
    if tiers:
        inside["tiers"] = Item(tiers, tiers[0].origin)
    if (manager := inside.pop("key_manager", None)) is not None:
        options = dict(table(manager, "lmcache.key_manager"))
        if "type" in options and options["type"].value != "default":
            inside["key_managers"] = Item(
                [_typed(manager, options, "lmcache.key_manager")], manager.origin
            )
    return inside


def expand(short: Mapping[str, Item], memory: str, notes: list[str], /) -> list[Item]:
    """Make the list of tiers that the short keys describe; without any, memory of the default size.

    Args:
        memory: plugin of the memory tier.
    """
    common: Tree = {}
    if (policy := short.get("cache_policy")) is not None:
        common["policy"] = Item(
            _value(str, policy, "cache_policy").lower(), _via(policy, "cache_policy")
        )
    if (timeout := short.get("blocking_timeout_secs")) is not None:
        common["deadline"] = Item(reread(timeout).value, _via(timeout, "blocking_timeout_secs"))
    tiers: list[tuple[str, Tree, str]] = []
    use = short.get("local_cpu")
    if use is None or _value(bool, use, "local_cpu"):
        size = short.get("max_local_cpu_size")
        options = {
            "size": _gib(size, "max_local_cpu_size") if size else Item(DEFAULT_SIZE, "default")
        }
        if (huge := short.get("local_cpu_use_hugepages")) is not None:
            options["huge_pages"] = huge
        tiers.append((memory, options, use.origin if use else "default"))
    for key, plugin in (("local_disk", "disk"), ("gds_path", "gds")):
        if (folder := short.get(key)) is not None and reread(folder).value not in OFF:
            written = _value(str, folder, key)
            paths = [part.strip().removeprefix("file://") for part in written.split(",")]
            options = {
                "path": Item([Item(path, folder.origin) for path in paths], _via(folder, key))
            }
            size = short.get("max_local_disk_size")
            if size is None:
                raise refuse(folder, key, "needs max_local_disk_size (in GiB) beside it")
            options["size"] = _gib(size, "max_local_disk_size")
            tiers.append((plugin, options, folder.origin))
    if (url := short.get("remote_url")) is not None and reread(url).value not in OFF:
        tiers.append(_remote(url, short, notes))
    elif (serde := short.get("remote_serde")) is not None and serde.value != "naive":
        raise refuse(serde, "remote_serde", "needs remote_url beside it")
    return [Item({p: Item({**common, **options}, origin)}, origin) for p, options, origin in tiers]


def _remote(url: Item, short: Mapping[str, Item], notes: list[str]) -> tuple[str, Tree, str]:
    scheme = urlsplit(_value(str, url, "remote_url")).scheme
    if scheme not in SCHEMES:
        raise refuse(
            url,
            "remote_url",
            f"no plugin for {scheme or 'no scheme'!r}; known: {', '.join(sorted(SCHEMES))}",
        )
    plugin, option = SCHEMES[scheme]
    written = url.value if option == "url" else urlsplit(url.value).path
    options = {option: Item(written, _via(url, "remote_url"))}
    serde = short.get("remote_serde")
    if serde is not None and serde.value not in ("naive", None):
        options["serde"] = Item([serde], _via(serde, "remote_serde"))
    extra = short.get("extra_config")
    for key, item in (table(extra, "extra_config") if extra is not None else {}).items():
        own = key.removeprefix(plugin).lstrip("_.")
        if key in EXTRA_NOTHING:
            notes.append(f"{item.origin}: extra_config.{key} has no effect: {EXTRA_NOTHING[key]}")
        elif key.startswith((f"{plugin}_", f"{plugin}.")):
            options[own] = item
        else:
            raise refuse(
                item,
                f"extra_config.{key}",
                f"unknown key; options of {plugin} begin with {plugin}_",
            )
    return plugin, options, url.origin


def _typed(item: Item, options: Tree, path: str) -> Item:
    """``{type: NAME, ...}`` as ``{NAME: {...}}``."""
    kind = options.pop("type", None)
    if kind is None or not isinstance(kind.value, str):
        raise refuse(item, f"{path}.type", "is required: the name of a plugin")
    return Item({kind.value: Item(options, item.origin)}, item.origin)


def _gib(item: Item, key: str) -> Item:
    value = reread(item).value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
        return Item(ByteSize(round(value * 2**30)), _via(item, key))
    if isinstance(value, str):  # a unit was written
        return Item(value, _via(item, key))
    raise refuse(item, key, f"not a size in GiB: {item.plain()!r}")


def _value(wanted: type[V], item: Item, key: str) -> V:
    found: V = Binder().convert(wanted, item, key)
    return found


def _via(item: Item, key: str) -> str:
    return f"{item.origin} ({key})"
