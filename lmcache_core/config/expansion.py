"""Short forms to the one grammar: known names of LMCache, and the ``lmcache:`` block of an engine's file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar
from urllib.parse import urlsplit

from lmcache_core.config.binding import Binder, table
from lmcache_core.config.names import BY_KEY, EXTRA_NOTHING, NAMES, Effect, Name, by_scheme
from lmcache_core.config.tree import NONE, Item, merge, nest, refuse, reread
from lmcache_core.spi import ByteSize

V = TypeVar("V")
Tree = dict[str, Item]
TIER_KEYS = tuple(
    row.key for row in NAMES if row.effect is Effect.MAPPED and (" " in row.to or not row.to)
)
"""Names that become tiers or parts of them."""
DEFAULT_SIZE = ByteSize(5 * 2**30)
NIXL_FILES = ("POSIX", "GDS", "GDS_MT", "HF3FS")
"""Plugins of NIXL that need a folder, and a limit."""
OFF: tuple[object, ...] = (None, False, 0, "", "None", [], {})


def rename(tree: Mapping[str, Item], notes: list[str], /) -> Tree:
    """Put the names of here in place of known names, in one source; note those without effect.

    Raises:
        ConfigError: a refused name, or a setting under two names.
    """
    renamed: Tree = {}
    for key, item in _lifted(tree):
        row = BY_KEY.get(key, Name(key, Effect.SAME, key))
        target = row.to if row.effect is Effect.MAPPED and key not in TIER_KEYS else key
        if key == "policy" and item.value == "exact":
            target, item = "exact", Item(True, item.origin)
        if row.effect is Effect.NOTHING:
            notes.append(f"{item.origin}: {key} has no effect: {row.why}")
        elif row.effect is Effect.REFUSED:
            if reread(item).plain() not in OFF:
                raise refuse(item, key, f"not supported: {row.why}")
        elif row.effect is not Effect.ELSEWHERE:
            if target in renamed or (target != key and target in tree):
                problem = f"is the same setting as {target}, which is given too; keep one"
                raise refuse(item, key, problem)
            renamed = merge(renamed, nest(target, item))
    return renamed


def _lifted(tree: Mapping[str, Item]) -> list[tuple[str, Item]]:
    """All that is written, NIXL's keys out of ``extra_config``, where most have them."""
    extra = reread(tree.get("extra_config", NONE)).value
    inner = {key for key in BY_KEY if "nixl" in key}
    if not isinstance(extra, dict) or not inner & extra.keys():
        return [*tree.items()]
    rest = {key: item for key, item in extra.items() if key not in inner}
    beside = {**tree, "extra_config": Item(rest, tree["extra_config"].origin)}
    return [*beside.items(), *(each for each in extra.items() if each[0] in inner)]


def from_block(file: Mapping[str, Item], notes: list[str], /) -> Tree:
    """Read the ``lmcache:`` block of a file whose other keys belong to an engine."""
    block = file["lmcache"]
    inside: Tree = dict(table(block, "lmcache"))
    for key in ("tiers", "tenants", "manager", "chunk_size", *TIER_KEYS):
        if key in file:
            problem = f"would be ignored beside the lmcache: block; move it inside ({block.origin})"
            raise refuse(file[key], key, problem)
    if not _on(inside, "lmcache"):
        return {"tiers": Item([], block.origin)}
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
        if _on(options, "lmcache.peer_to_peer"):
            tiers.append(Item({"p2p": Item(options, peers.origin)}, peers.origin))
    if tiers:
        inside["tiers"] = Item(tiers, tiers[0].origin)
    if (manager := inside.pop("key_manager", None)) is not None:
        options = dict(table(manager, "lmcache.key_manager"))
        if "type" in options and options["type"].value != "default":
            typed = _typed(manager, options, "lmcache.key_manager")
            inside["key_managers"] = Item([typed], manager.origin)
    return inside


def expand(short: Mapping[str, Item], memory: str, notes: list[str], /) -> list[Item]:
    """Make the list of tiers that the short keys describe; without any, memory of the default size.

    Args:
        memory: plugin of the memory tier.
    """
    common: Tree = {}
    if (policy := short.get("cache_policy")) is not None:
        name = _value(str, policy, "cache_policy").lower()
        common["policy"] = _via(policy, "cache_policy", name)
    if (timeout := short.get("blocking_timeout_secs")) is not None:
        common["deadline"] = _via(timeout, "blocking_timeout_secs", reread(timeout).value)
    tiers: list[tuple[str, Tree, str]] = []
    use = short.get("local_cpu")
    if use is None or _value(bool, use, "local_cpu"):
        options = {"size": Item(DEFAULT_SIZE, "default")}
        if (size := short.get("max_local_cpu_size")) is not None:
            options["size"] = _gib(size, "max_local_cpu_size")
        if (huge := short.get("local_cpu_use_hugepages")) is not None:
            options["huge_pages"] = huge
        tiers.append((memory, options, use.origin if use else "default"))
    tiers += _nixl(short)
    for key, plugin in (("local_disk", "disk"), ("gds_path", "gds")):
        if (folder := _given(short, key)) is not None:
            tiers.append((plugin, _folders(folder, key, short), folder.origin))
    if (url := _given(short, "remote_url")) is not None:
        tiers.append(_remote(url, short, notes))
    elif (serde := short.get("remote_serde")) is not None and serde.value != "naive":
        raise refuse(serde, "remote_serde", "needs remote_url beside it")
    return [Item({p: Item({**common, **options}, origin)}, origin) for p, options, origin in tiers]


def _folders(folder: Item, key: str, short: Mapping[str, Item]) -> Tree:
    """Where files lie, and how much of them there may be."""
    written = _value(str, folder, key).split(",")
    paths = [Item(path.strip().removeprefix("file://"), folder.origin) for path in written]
    size = short.get("max_local_disk_size")
    if size is None:
        raise refuse(folder, key, "needs max_local_disk_size (in GiB) beside it")
    return {"path": _via(folder, key, paths), "size": _gib(size, "max_local_disk_size")}


def _nixl(short: Mapping[str, Item]) -> list[tuple[str, Tree, str]]:
    use = short.get("enable_nixl_storage")
    for key in ("nixl_backend", "nixl_path", "nixl_backend_params"):
        if use is None and key in short:
            raise refuse(short[key], key, "needs enable_nixl_storage beside it")
    if use is None or not _value(bool, use, "enable_nixl_storage"):
        return []
    written = short.get("nixl_backend_params", NONE)
    options = dict(table(written, "nixl_backend_params"))
    secret: Tree = {key: options.pop(key) for key in ("access_key", "secret_key") if key in options}
    rail: Tree = {"params": _via(written, "nixl_backend_params", options)} if options else {}
    kind = short.get("nixl_backend", Item("POSIX", "default"))
    rail["backend"] = kind
    folder = _given(short, "nixl_path")
    if folder is None or kind.value not in NIXL_FILES:
        return [("nixl", {**rail, **secret}, use.origin)]
    files = _folders(folder, "nixl_path", short)
    rails = [{**rail, "path": _via(path, "nixl_path", path.value)} for path in files["path"].value]
    if len(rails) == 1:
        return [("nixl", {**rails[0], **secret, "size": files["size"]}, use.origin)]
    many = _via(folder, "nixl_path", [Item(each, folder.origin) for each in rails])
    return [("nixl", {"rails": many, "size": files["size"]}, use.origin)]


def _remote(url: Item, short: Mapping[str, Item], notes: list[str]) -> tuple[str, Tree, str]:
    place = urlsplit(_value(str, url, "remote_url"))
    try:  # an underscore is not allowed in a scheme, but may have been meant as one
        plugin, option = by_scheme(place.scheme or url.value.rpartition("://")[0])
    except LookupError as error:
        raise refuse(url, "remote_url", str(error)) from None
    written = place.path if option == "path" else url.value
    options = {option: _via(url, "remote_url", written)}
    serde = short.get("remote_serde")
    if serde is not None and serde.value not in ("naive", None):
        options["serde"] = _via(serde, "remote_serde", [serde])
    for key, item in table(short.get("extra_config", NONE), "extra_config").items():
        if key in EXTRA_NOTHING:
            notes.append(f"{item.origin}: extra_config.{key} has no effect: {EXTRA_NOTHING[key]}")
        elif key.startswith((f"{plugin}_", f"{plugin}.")):
            options[key.removeprefix(plugin).lstrip("_.")] = item
        else:
            problem = f"unknown key; options of {plugin} begin with {plugin}_"
            raise refuse(item, f"extra_config.{key}", problem)
    return plugin, options, url.origin


def _typed(item: Item, options: Tree, path: str) -> Item:
    """``{type: NAME, ...}`` as ``{NAME: {...}}``."""
    kind = options.pop("type", None)
    if kind is None or not isinstance(kind.value, str):
        raise refuse(item, f"{path}.type", "is required: the name of a plugin")
    return Item({kind.value: Item(options, item.origin)}, item.origin)


def _on(options: Tree, path: str) -> bool:
    """Take ``enable`` out; whether it leaves the rest on."""
    enable = options.pop("enable", None)
    return enable is None or _value(bool, enable, f"{path}.enable")


def _given(short: Mapping[str, Item], key: str) -> Item | None:
    item = short.get(key)
    return None if item is None or reread(item).value in OFF else item


def _gib(item: Item, key: str) -> Item:
    value = reread(item).value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
        return _via(item, key, ByteSize(round(value * 2**30)))
    if isinstance(value, str):  # a unit was written
        return _via(item, key, value)
    raise refuse(item, key, f"not a size in GiB: {item.plain()!r}")


def _value(wanted: type[V], item: Item, key: str) -> V:
    found: V = Binder().convert(wanted, item, key)
    return found


def _via(item: Item, key: str, value: object) -> Item:
    """A value that was written in other words."""
    return Item(value, f"{item.origin} ({key})")
