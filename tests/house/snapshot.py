"""Write the public surface of the frozen parts of the plugin contract as text.

    python tests/house/snapshot.py > tests/house/spi_frozen.txt

A change of that file is a change for every plugin: before 1.0 say so in docs/changes, after it raise PLUGIN_API.
"""

from __future__ import annotations

import dataclasses
import inspect
from enum import Enum
from importlib import import_module
from typing import Any

FROZEN = (
    "api",
    "adapter",
    "backend",
    "blocking",
    "buffers",
    "config",
    "errors",
    "keys",
    "policy",
    "polled",
    "serde",
)
PROVISIONAL = ("channel", "gpu")


def surface(module_name: str) -> list[str]:
    """One line per public name, field, method and property of a module."""
    module = import_module(f"lmcache_core.spi.{module_name}")
    out = [f"[{module_name}]"]
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or inspect.ismodule(value):
            continue
        if getattr(value, "__module__", module.__name__) != module.__name__:
            continue
        if inspect.isclass(value):
            out += _class(name, value)
        elif inspect.isfunction(value):
            out.append(f"def {name}{inspect.signature(value)}")
        else:
            out.append(f"{name} = {value!r}")
    return out


def _class(name: str, kind: type) -> list[str]:
    bases = ", ".join(base.__name__ for base in kind.__bases__ if base is not object)
    out = [f"class {name}({bases})"]
    if issubclass(kind, Enum):
        return out + [f"  {member.name} = {member.value!r}" for member in kind]
    if dataclasses.is_dataclass(kind):
        for field in dataclasses.fields(kind):
            required = field.default is field.default_factory is dataclasses.MISSING
            written = (
                field.type if isinstance(field.type, str) else getattr(field.type, "__name__", "")
            )
            keyword = " keyword-only" if field.kw_only else ""
            out.append(f"  {field.name}: {written}{'' if required else ' = ...'}{keyword}")
    else:
        for attribute, annotation in inspect.get_annotations(kind).items():
            if not attribute.startswith("_"):
                out.append(f"  {attribute}: {annotation}")
    for attribute, value in sorted(vars(kind).items()):
        if attribute.startswith("_"):
            continue
        out += _member(attribute, value)
    return out


def _member(name: str, value: Any) -> list[str]:
    if isinstance(value, property):
        return [f"  property {name}"]
    plain = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    if not inspect.isfunction(plain):
        return []
    abstract = "abstract " if getattr(plain, "__isabstractmethod__", False) else ""
    kind = "async def" if inspect.iscoroutinefunction(plain) else "def"
    return [f"  {abstract}{kind} {name}{inspect.signature(plain)}"]


def snapshot() -> str:
    """The whole frozen surface."""
    return "\n".join(line for module in FROZEN for line in surface(module)) + "\n"


if __name__ == "__main__":
    print(snapshot(), end="")  # noqa: T201 -- this is the script's output
