"""What was written, before anybody knows what it means: values that remember where they come from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from lmcache_core.spi import ConfigError

NODE_LIMIT = 100_000
"""Most values in one file, aliases expanded; more is a mistake or an attack."""
_REFERENCE = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)(:-([^}\n]*))?\}")
# A reference holds braces, which mean something inside `{...}`; a mark stands for it while YAML is read.
_MARK = re.compile("\ue000([0-9]+)\ue001")


@dataclass(frozen=True, slots=True)
class Item:
    """One written value.

    Attributes:
        value: a scalar, ``dict[str, Item]`` or ``list[Item]``.
        origin: where it was written (``kv.yaml:3``, ``environment LMCACHE_CHUNK_SIZE``).
        text: it comes from a place that knows only text, and is read as YAML where text is not wanted.
    """

    value: Any
    origin: str
    text: bool = False

    def plain(self) -> Any:
        """The value without origins."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


NONE = Item({}, "default")
"""What nobody wrote."""


def refuse(item: Item, path: str, problem: str, /) -> ConfigError:
    """Make the one-line error about a written value."""
    where = f"{item.origin}: {path}: " if path else f"{item.origin}: "
    return ConfigError(where + problem)


def read_yaml(text: str, name: str, environment: Mapping[str, str] | None, /) -> Item:
    """Read YAML or JSON, keeping line numbers, with ``${VAR}`` and ``${VAR:-default}`` in values.

    What a reference stands for is a value; it can never add keys. Without an environment there are none.

    Raises:
        ConfigError: not YAML, a key twice, a key that is not text, an unset variable.
    """
    references: list[re.Match[str]] = []

    def mark(match: re.Match[str]) -> str:
        references.append(match)
        return f"\ue000{len(references) - 1}\ue001"

    if environment is not None and not _MARK.search(text):
        text = _REFERENCE.sub(mark, text)
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return Item({}, name)
        return _Reader(loader, name, environment, references).item(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        place = getattr(error, "problem_mark", None)
        line = f":{place.line + 1}" if place else ""
        problem = getattr(error, "problem", None) or str(error).split("\n", 1)[0]
        raise ConfigError(f"{name}{line}: not YAML: {problem}") from error


@dataclass(slots=True)
class _Reader:
    """Turns nodes into items; one per text."""

    loader: yaml.SafeLoader
    name: str
    environment: Mapping[str, str] | None
    references: Sequence[re.Match[str]]
    count: int = 0

    def item(self, node: yaml.Node, inside: tuple[yaml.Node, ...] = ()) -> Item:
        self.count += 1
        origin = f"{self.name}:{node.start_mark.line + 1}"
        if self.count > NODE_LIMIT or node in inside:
            raise ConfigError(f"{origin}: more than {NODE_LIMIT} values, aliases expanded")
        if isinstance(node, yaml.MappingNode):
            return Item(self.mapping(node, inside), origin)
        if isinstance(node, yaml.SequenceNode):
            return Item([self.item(child, (*inside, node)) for child in node.value], origin)
        assert isinstance(node, yaml.ScalarNode)
        written = self.resolved(node.value, origin)
        if written != node.value:
            quoted = node.style is not None
            implicit = (not quoted, quoted)
            tag = self.loader.resolve(yaml.ScalarNode, written, implicit)  # type: ignore[no-untyped-call]
            node = yaml.ScalarNode(tag, written, node.start_mark, node.end_mark, node.style)
        value = self.loader.construct_object(node)
        return Item(value, origin)

    def mapping(self, node: yaml.MappingNode, inside: tuple[yaml.Node, ...]) -> dict[str, Item]:
        found: dict[str, Item] = {}
        own = [key.value for key, _ in node.value]
        for position, (key, _) in enumerate(node.value):
            origin = f"{self.name}:{key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{origin}: a key must be text")
            if key.value in own[:position]:
                raise ConfigError(f"{origin}: key {key.value!r} is there twice")
        self.loader.flatten_mapping(node)
        for key, child in node.value:
            # The text of the key, since YAML reads a bare `on` as a truth value.
            item = self.item(child, (*inside, node))
            line = f"{self.name}:{key.start_mark.line + 1}"
            found[self.resolved(key.value, line)] = Item(item.value, line, item.text)
        return found

    def resolved(self, written: str, origin: str) -> str:
        """Put values in the place of references; ``$${`` is a literal ``${``."""
        if self.environment is None:
            return written
        environment = self.environment
        if (start := written.find("${")) >= 0:
            raise ConfigError(
                f"{origin}: not a reference: {written[start : start + 20]!r}"
                " (write ${NAME}, ${NAME:-default}, or $${ for the characters themselves)"
            )

        def replace(match: re.Match[str]) -> str:
            name, has_default, default = self.references[int(match[1])].groups()
            if name is None:
                return "${"
            if has_default:
                return environment.get(name) or default or ""
            if name not in environment:
                raise ConfigError(
                    f"{origin}: environment variable {name} is not set;"
                    f" set it or write ${{{name}:-default}}"
                )
            return environment[name]

        return _MARK.sub(replace, written)


def items(data: Any, origin: str, /, *, text: bool = False) -> Item:
    """Give plain data an origin."""
    if isinstance(data, Mapping):
        return Item({str(k): items(v, origin, text=text) for k, v in data.items()}, origin)
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        return Item([items(value, origin, text=text) for value in data], origin)
    return Item(data, origin, text and isinstance(data, str))


def reread(item: Item, /) -> Item:
    """Read text from the environment or a flag as YAML; everything else stays."""
    if not item.text:
        return item
    fresh = read_yaml(item.value, item.origin, None) if item.value.strip() else Item("", "")
    return items(fresh.plain(), item.origin, text=False)


def nest(path: str, item: Item, /) -> dict[str, Item]:
    """Make ``a.b`` a mapping in a mapping."""
    first, *rest = path.split(".")
    for key in reversed(rest):
        item = Item({key: item}, item.origin)
    return {first: item}


def merge(under: dict[str, Item], over: Mapping[str, Item], /) -> dict[str, Item]:
    """Lay one mapping over another; mappings inside are merged, everything else is replaced."""
    merged = dict(under)
    for key, item in over.items():
        old = merged.get(key)
        if old is not None and isinstance(old.value, dict) and isinstance(item.value, dict):
            item = Item(merge(old.value, item.value), item.origin)
        merged[key] = item
    return merged
