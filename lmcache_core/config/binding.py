"""Written values to records, strictly: a record is a dataclass whose field types say what is accepted.

Beyond plain types a field may have any type with a ``parse`` class method (``ByteSize``, ``Duration``), an
enum (by value), ``Secret``, other records, and sequences, mappings and unions of these. ``Annotated[...,
KIND]`` marks plugins of a kind: a list of choices, or a mapping of names to options.
"""

from __future__ import annotations

import re
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from pathlib import PurePath
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from lmcache_core.config.records import PluginChoice
from lmcache_core.config.tree import Item, refuse, reread
from lmcache_core.registry import Registry
from lmcache_core.spi import ByteSize, ConfigError, Duration, PluginError, Secret

R = TypeVar("R")
_CREDENTIALS = re.compile(r"(?<=//)[^/@\s]+(?=@)")
_SECRET_NAME = re.compile(r"passw|secret|token$|credential|api_?key|access_?key|private_?key")
_SIZES = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "": 1}
_KINDS: dict[Any, str] = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text",
    dict: "a mapping", list: "a list", types.NoneType: "nothing",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """One effective value: its path, the value as written text or a plain type, and who said so."""

    path: str
    value: object
    source: str


@dataclass(slots=True)
class Binder:
    """Makes records of written values.

    Attributes:
        registry: knows the plugins that records name.
        settings: every effective value so far.
    """

    registry: Registry | None = None
    settings: list[Setting] = field(default_factory=list)

    def note(self, path: str, value: object, source: str, /) -> None:
        """Add a setting, a record field by field; nothing secret is kept."""
        if is_dataclass(value) and not isinstance(value, type):
            for each in fields(value):
                self.note(join(path, each.name), getattr(value, each.name), source)
            return
        self.settings.append(Setting(path, shown(value, path.rpartition(".")[2]), source))

    def bind(
        self,
        kind: type[R],
        item: Item,
        path: str,
        /,
        *,
        given: Mapping[str, object] | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> R:
        """Make a record of a mapping.

        Args:
            given: fields that are decided already.
            hints: what to say about particular keys that are unknown here, and about keys like them.

        Raises:
            ConfigError: unknown or missing key, wrong type, or a value the record refuses.
        """
        values: dict[str, Any] = dict(given or {})
        mapping = table(item, path)
        types_of = get_type_hints(kind, include_extras=True)
        known = {f.name: f for f in fields(kind) if f.init and f.name not in values}  # type: ignore[arg-type]
        for key, value in mapping.items():
            if key not in known:
                problem = f"unknown key; {_remedy(key, known, hints or {})}"
                raise refuse(value, join(path, key), problem)
        for name, each in known.items():
            if name in mapping:
                values[name] = self.convert(types_of[name], mapping[name], join(path, name))
            elif each.default is not MISSING or each.default_factory is not MISSING:
                made = each.default if each.default_factory is MISSING else each.default_factory()
                self.note(join(path, name), made, "default")
            else:
                raise refuse(item, join(path, name), "is required")
        try:
            return kind(**values)
        except (ValueError, TypeError) as error:
            # A record names the field first; say where that was written.
            culprit = mapping.get(str(error).split(" ", 1)[0], item)
            raise refuse(culprit, path, str(error)) from error

    def convert(self, wanted: Any, item: Item, path: str, /) -> Any:
        """Make one value of a written one."""
        if is_dataclass(wanted):
            return self.bind(wanted, item, path)  # type: ignore[arg-type]  # a type, not an instance
        origin, arguments = get_origin(wanted), get_args(wanted)
        if origin is Annotated:
            return self._plugins(arguments[1], item, path)
        if origin in (Union, types.UnionType):
            return self._union(arguments, item, path)
        if origin in (list, tuple, frozenset, set, Sequence, Collection):
            return self._sequence(origin, arguments[0], item, path)
        if origin in (dict, Mapping):
            inside = table(item, path)
            return {k: self.convert(arguments[1], v, join(path, k)) for k, v in inside.items()}
        try:
            value = _leaf(wanted, item)
        except ValueError as error:
            raise refuse(item, path, str(error)) from None
        self.note(path, value, item.origin)
        return value

    def plugin(self, kind: str, name: str, item: Item, path: str, /) -> Any:
        """The class behind a name, even if it cannot work here."""
        assert self.registry is not None, "whoever binds records with plugins has a registry"
        try:
            return self.registry.load(kind, name, anyway=True)
        except PluginError as error:
            raise type(error)(f"{item.origin}: {path}: {error}") from error

    def choice(self, kind: str, item: Item, path: str, /) -> PluginChoice:
        """A plugin with its options: ``NAME`` or ``NAME: {options}``."""
        item = one_key(item, path)
        ((name, options),) = item.value.items()
        found = self.plugin(kind, name, item, path)
        self.note(path, name, item.origin)
        return PluginChoice(
            name=name, options=self.bind(found.config_type, options, join(path, name))
        )

    def _plugins(self, kind: str, item: Item, path: str) -> Any:
        if kind == "wrappers":
            inside = table(item, path)
            return {k: self._wrapper(k, part, join(path, k)) for k, part in inside.items()}
        value = reread(item).value
        parts = value if isinstance(value, list) else [item]
        return tuple(
            self.choice(kind, part, f"{path}[{index}]") for index, part in enumerate(parts)
        )

    def _wrapper(self, name: str, item: Item, path: str) -> object:
        found = self.plugin("wrappers", name, item, path)
        if reread(item).value is False:  # one that is there unasked is left out
            self.note(path, False, item.origin)
            return False
        return self.bind(found.config_type, item, path)

    def _union(self, arguments: tuple[Any, ...], item: Item, path: str) -> Any:
        nothing = item.value is None or (item.text and item.value.strip() in ("", "null"))
        if nothing and types.NoneType in arguments:
            self.note(path, None, item.origin)
            return None
        problems: list[str] = []
        before = len(self.settings)
        for wanted in arguments:
            if wanted is not types.NoneType:
                try:
                    return self.convert(wanted, item, path)
                except ConfigError as error:
                    del self.settings[before:]
                    where = str(refuse(item, path, "")) if problems else ""
                    problems.append(str(error).removeprefix(where))
        raise ConfigError("; or ".join(problems))

    def _sequence(self, origin: Any, single: Any, item: Item, path: str) -> Any:
        value = reread(item).value
        if isinstance(value, str) and item.text:
            value = [Item(part.strip(), item.origin, True) for part in value.split(",")]
        elif value is None or isinstance(value, dict):
            raise refuse(item, path, f"expected a list, got {_kind_of(value)}")
        elif not isinstance(value, list):
            value = [Item(value, item.origin)]  # one value stands for a list of it
        before = len(self.settings)
        found = [self.convert(single, part, f"{path}[{i}]") for i, part in enumerate(value)]
        if not is_dataclass(single):
            del self.settings[before:]
            self.note(path, found, item.origin)
        return (origin if origin in (list, set, frozenset) else tuple)(found)


def table(item: Item, path: str, /) -> dict[str, Item]:
    """The mapping that a record is made of; nothing at all is an empty one."""
    value = reread(item).value
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refuse(item, path, f"expected a mapping of keys, got {_kind_of(value)}")
    return value


def one_key(item: Item, path: str, /) -> Item:
    """``NAME`` or ``{NAME: {options}}`` as the latter."""
    value = reread(item).value
    if isinstance(value, str):
        return Item({value: Item({}, item.origin)}, item.origin)
    if isinstance(value, dict) and len(value) == 1:
        return Item(value, item.origin)
    got = f"the keys {', '.join(value)}" if isinstance(value, dict) else "something else"
    problem = f"expected one mapping NAME: {{options}}, got {got} (options are indented further)"
    raise refuse(item, path, problem)


def join(path: str, key: str, /) -> str:
    return f"{path}.{key}" if path else key


def shown(value: object, name: str = "", /) -> object:
    """A value as plain text, number or list, with nothing in it that must stay secret."""
    if isinstance(value, Secret) or (
        value and isinstance(value, str) and _SECRET_NAME.search(name)
    ):
        return "***"
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, ByteSize) and value:
        unit, factor = next(each for each in _SIZES.items() if value % each[1] == 0)
        return f"{value // factor}{unit}" if unit else int(value)
    if isinstance(value, Duration):
        return f"{value * 1000:g}ms" if 0 < value < 1 else f"{value:g}s"
    if isinstance(value, PluginChoice):
        options: Any = value.options
        named = fields(options) if options is not None else ()
        value = {value.name: {each.name: getattr(options, each.name) for each in named}}
    if isinstance(value, Mapping):
        return {str(key): shown(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [shown(inner, name) for inner in value]
    if isinstance(value, (str, PurePath)):
        return _CREDENTIALS.sub("***", str(value))
    return value if isinstance(value, (bool, int, float, type(None))) else repr(value)


def _remedy(key: str, known: Iterable[str], hints: Mapping[str, str]) -> str:
    """What to say about a key that does not exist."""
    near = [key] if key in hints else get_close_matches(key, [*known, *hints], 1)
    if near:
        return hints.get(near[0], f"did you mean {near[0]!r}?")
    return f"valid: {', '.join(sorted(known)) or 'none'}"


def _leaf(wanted: Any, item: Item) -> Any:
    if isinstance(item.value, (dict, list)) and wanted is not Any:
        raise ValueError(f"expected a single value, got {_kind_of(item.value)}")
    if parse := getattr(wanted, "parse", None):
        return parse(item.value)
    if isinstance(wanted, type) and issubclass(wanted, (str, PurePath, Secret)):
        if not isinstance(item.value, str):
            raise ValueError(f"expected text, got {_kind_of(item.value)}; write it in quotes")
        if "\0" in item.value:
            raise ValueError("holds a NUL character")
        return wanted(item.value)
    value = reread(item).plain()
    if choices := _choices(wanted):
        if isinstance(value, bool):  # YAML reads a bare `off` as a truth value
            value = "on" if value else "off"
        name = str(value).lower().replace("_", "-")
        if name in choices:
            return choices[name]
        near = get_close_matches(name, choices, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(choices)}"
        raise ValueError(f"not one of the choices: {value!r}; {hint}")
    try:
        return msgspec.convert(value, wanted)
    except msgspec.ValidationError as error:
        if wanted in _KINDS:
            raise ValueError(f"expected {_KINDS[wanted]}, got {_kind_of(value)}") from None
        raise ValueError(str(error).split("\n", 1)[0]) from None


def _choices(wanted: Any) -> dict[str, Any]:
    if get_origin(wanted) is Literal:
        return {str(choice): choice for choice in get_args(wanted)}
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        return {str(choice.value): choice for choice in wanted}
    return {}


def _kind_of(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)
