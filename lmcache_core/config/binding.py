"""Written values to records, strictly: a record is a dataclass whose field types say what is accepted.

Beyond plain types a field may have any type with a ``parse`` class method (``ByteSize``, ``Duration``), an
enum (by value), ``Secret``, other records, and sequences, mappings and unions of these.
"""

from __future__ import annotations

import re
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from pathlib import PurePath
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from lmcache_core.config.tree import Item, refuse, reread
from lmcache_core.spi import ByteSize, ConfigError, Duration, Secret

R = TypeVar("R")
_CREDENTIALS = re.compile(r"(?<=//)[^/@\s]+(?=@)")
_SECRET_NAME = re.compile(r"passw|secret|token$|credential|api_?key|access_?key|private_?key")


@dataclass(frozen=True, slots=True)
class Setting:
    """One effective value: its path, the value as written text or a plain type, and who said so."""

    path: str
    value: object
    source: str


def bind(
    kind: type[R],
    item: Item,
    path: str,
    settings: list[Setting],
    /,
    *,
    given: Mapping[str, object] | None = None,
    also: Iterable[str] = (),
    hints: Mapping[str, str] | None = None,
) -> R:
    """Make a record of a mapping.

    Args:
        settings: receives every effective value.
        given: fields that are decided already.
        also: further keys that are valid beside these, for suggestions.
        hints: what to say about particular unknown keys.

    Raises:
        ConfigError: unknown or missing key, wrong type, or a value the record refuses.
    """
    given = given or {}
    mapping = table(item, path)
    types_of = get_type_hints(kind)
    known = {f.name: f for f in fields(kind) if f.init and f.name not in given}  # type: ignore[arg-type]
    for key, value in mapping.items():
        if key not in known:
            raise unknown(value, join(path, key), key, known, also, hints or {})
    values: dict[str, Any] = dict(given)
    for name, field in known.items():
        if name in mapping:
            values[name] = convert(types_of[name], mapping[name], join(path, name), settings)
        elif field.default is not MISSING or field.default_factory is not MISSING:
            made = field.default if field.default_factory is MISSING else field.default_factory()
            settings.append(Setting(join(path, name), shown(made, name), "default"))
        else:
            raise refuse(item, join(path, name), "is required")
    try:
        return kind(**values)
    except (ValueError, TypeError) as error:
        # A record names the field first; say where that was written.
        culprit = mapping.get(str(error).split(" ", 1)[0], item)
        raise refuse(culprit, path, str(error)) from error


def convert(wanted: Any, item: Item, path: str, settings: list[Setting], /) -> Any:
    """Make one value of a written one."""
    if is_dataclass(wanted):
        return bind(wanted, item, path, settings)  # type: ignore[arg-type]  # a type, not an instance
    origin, arguments = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return _union(arguments, item, path, settings)
    if origin in (list, tuple, frozenset, set, Sequence, Collection):
        return _sequence(origin, arguments, item, path, settings)
    if origin in (dict, Mapping):
        inside = table(item, path)
        return {
            key: convert(arguments[1], inside[key], join(path, key), settings) for key in inside
        }
    try:
        value = _leaf(wanted, item)
    except ValueError as error:
        raise refuse(item, path, str(error)) from None
    settings.append(Setting(path, shown(value, path.rpartition(".")[2]), item.origin))
    return value


def table(item: Item, path: str, /) -> dict[str, Item]:
    """The mapping that a record is made of; nothing at all is an empty one."""
    value = reread(item).value
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refuse(item, path, f"expected a mapping of keys, got {_kind_of(value)}")
    return value


def unknown(
    item: Item,
    path: str,
    key: str,
    known: Iterable[str],
    also: Iterable[str],
    hints: Mapping[str, str],
    /,
) -> ConfigError:
    """Make the error about a key that does not exist, naming the nearest that does."""
    if key in hints:
        remedy = hints[key]
    elif near := get_close_matches(key, [*known, *also], 1):
        remedy = f"did you mean {near[0]!r}?"
    elif near := get_close_matches(key, hints, 1):
        remedy = hints[near[0]]
    else:
        remedy = f"valid: {', '.join(sorted(known)) or 'none'}"
    return refuse(item, path, f"unknown key; {remedy}")


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
    if isinstance(value, ByteSize):
        return _quantity(value, (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)))
    if isinstance(value, Duration):
        return f"{value * 1000:g}ms" if 0 < value < 1 else f"{value:g}s"
    if isinstance(value, Mapping):
        return {str(key): shown(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [shown(inner, name) for inner in value]
    if isinstance(value, (str, PurePath)):
        return _CREDENTIALS.sub("***", str(value))
    return value if isinstance(value, (bool, int, float, type(None))) else repr(value)


def _quantity(value: int, units: Sequence[tuple[str, int]]) -> object:
    for unit, factor in units:
        if value and value % factor == 0:
            return f"{value // factor}{unit}"
    return int(value)


def _union(arguments: tuple[Any, ...], item: Item, path: str, settings: list[Setting]) -> Any:
    nothing = item.value is None or (item.text and item.value.strip() in ("", "null"))
    if nothing and types.NoneType in arguments:
        settings.append(Setting(path, None, item.origin))
        return None
    problems = []
    for wanted in arguments:
        if wanted is types.NoneType:
            continue
        tried: list[Setting] = []
        try:
            value = convert(wanted, item, path, tried)
        except ConfigError as error:
            problems.append(str(error))
            continue
        settings.extend(tried)
        return value
    first, *rest = problems
    where = refuse(item, path, "")
    raise ConfigError("; or ".join([first, *(p.removeprefix(str(where)) for p in rest)]))


def _sequence(
    origin: Any, arguments: tuple[Any, ...], item: Item, path: str, settings: list[Setting]
) -> Any:
    fresh = reread(item)
    if isinstance(fresh.value, str) and item.text:
        fresh = Item(
            [Item(part.strip(), item.origin, True) for part in fresh.value.split(",")], item.origin
        )
    elif not isinstance(fresh.value, (list, dict)) and fresh.value is not None:
        fresh = Item([fresh], item.origin)  # one value stands for a list of it
    if not isinstance(fresh.value, list):
        raise refuse(item, path, f"expected a list, got {_kind_of(fresh.value)}")
    single = arguments[0]
    inner: list[Setting] = []
    found = [
        convert(single, part, f"{path}[{index}]", inner) for index, part in enumerate(fresh.value)
    ]
    if is_dataclass(single):
        settings.extend(inner)
    else:
        settings.append(Setting(path, shown(found, path.rpartition(".")[2]), item.origin))
    made: type = (
        origin
        if isinstance(origin, type) and not origin.__module__.startswith("collections")
        else tuple
    )
    return made(found)


def _leaf(wanted: Any, item: Item) -> Any:
    if isinstance(item.value, (dict, list)) and wanted is not Any:
        raise ValueError(f"expected a single value, got {_kind_of(item.value)}")
    if parse := getattr(wanted, "parse", None):
        return parse(item.value)
    if (
        wanted is str
        or wanted is Secret
        or (isinstance(wanted, type) and issubclass(wanted, PurePath))
    ):
        if not isinstance(item.value, str):
            raise ValueError(f"expected text, got {_kind_of(item.value)}; write it in quotes")
        return wanted(item.value)
    value = reread(item).plain()
    choices = _choices(wanted)
    if choices is not None:
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
        name = getattr(wanted, "__name__", str(wanted))
        names = {"int": "a whole number", "float": "a number", "bool": "true or false"}
        if wanted in (int, float, bool):
            raise ValueError(f"expected {names[name]}, got {_kind_of(value)}") from None
        raise ValueError(str(error).split("\n", 1)[0]) from None


def _choices(wanted: Any) -> dict[str, Any] | None:
    if get_origin(wanted) is Literal:
        return {str(choice): choice for choice in get_args(wanted)}
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        return {str(choice.value): choice for choice in wanted}
    return None


def _kind_of(value: object) -> str:
    names = {
        bool: "true or false", int: "a whole number", float: "a number", str: "text",
        dict: "a mapping", list: "a list", types.NoneType: "nothing",
    }  # fmt: skip
    return names.get(type(value), type(value).__name__)
