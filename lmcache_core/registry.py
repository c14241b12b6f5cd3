"""Plugins by name: found in entry points, loaded one at a time, never because they happen to be installed.

Groups are ``lmcache_core.KIND``. Six things can go wrong, each with its own error and remedy: missing,
misspelt, denied, conflicting, broken, incompatible; and a plugin may be *unavailable* on this machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from lmcache_core import __version__, spi
from lmcache_core._catalogue import CATALOGUE, Entry
from lmcache_core.spi import (
    PLUGIN_API,
    PluginConflict,
    PluginDenied,
    PluginIncompatible,
    PluginLoadError,
    PluginNotFound,
    PluginUnavailable,
)

if TYPE_CHECKING:  # costs 20 ms, which `lmcache --help` has no use for
    from importlib.metadata import EntryPoint

PREFIX = "lmcache_core."
ENVIRONMENT = "LMCACHE_PLUGINS"
FINDERS = "finders"
"""Group of functions ``kind -> {name: "module:object"}`` that know names from another registry."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of plugin: its name in messages, what it must subclass, whether it has a ``config_type``."""

    noun: str
    bases: tuple[type, ...] = ()
    configured: bool = True


KINDS: Mapping[str, Kind] = {
    "backends": Kind("backend", (spi.AbstractBackend,)),
    "serdes": Kind("serde", (spi.TensorSerde, spi.BytesSerde)),
    "gpu_connectors": Kind("gpu connector", (spi.GPUConnector,), configured=False),
    "policies": Kind("policy", (spi.EvictionPolicy,)),
    "wrappers": Kind("wrapper", (spi.Wrapper,)),
    "channels": Kind("channel", (spi.TransferChannel,)),
    "key_managers": Kind("key manager", (spi.KeyManager,)),
    "ops": Kind("ops module", configured=False),
    "observers": Kind("observer"),
    "commands": Kind("command", configured=False),
}


@dataclass(frozen=True, slots=True)
class Offer:
    """A name that one distribution offers. Its metadata is read only when somebody asks for it."""

    kind: str
    name: str
    target: str
    entry: EntryPoint | None = None
    source: str = ""
    """What stands in for the distribution when there is no entry point of its own."""

    @property
    def dist(self) -> str:
        return self.entry.dist.name if self.entry and self.entry.dist else self.source or "lmcache"

    @property
    def version(self) -> str:
        if self.entry is None or self.entry.dist is None:
            return __version__ if self.core else ""
        return self.entry.dist.version

    @property
    def core(self) -> bool:
        """Whether the code behind it is this package, which is loaded already."""
        return self.target.startswith(PREFIX)

    @property
    def origin(self) -> str:
        return f"({self.dist} {self.version})".replace(" )", ")")


@cache
def _installed(path: tuple[str, ...]) -> tuple[Offer, ...]:
    """Read the entry points of everything on ``path`` (``sys.path``), once."""
    from importlib.metadata import entry_points

    found = entry_points()
    groups = [kind for kind in (*KINDS, FINDERS) if PREFIX + kind in found.groups]
    return tuple(
        Offer(kind, entry.name, entry.value.partition("[")[0].replace(" ", ""), entry)
        for kind in groups
        for entry in found.select(group=PREFIX + kind)
    )


def installed() -> Sequence[Offer]:
    """Everything that installed distributions offer, without importing any of it."""
    return _installed(tuple(sys.path))


class Registry:
    """Answers which class a name stands for, under one set of permissions.

    Code that ships with the core may always load unless it is denied; everything else must pass ``deny``,
    then ``allow``, then the environment variable ``LMCACHE_PLUGINS``, which lists exactly what may load.
    Of commands only the environment is asked: they are chosen before a configuration is read.
    """

    def __init__(
        self,
        *,
        allow: Sequence[str] | None = None,
        deny: Sequence[str] = (),
        allow_paths: bool = False,
        environment: Mapping[str, str] = os.environ,
        find: Callable[[], Sequence[Offer]] = installed,
        catalogue: Sequence[Entry] = CATALOGUE,
        version: str = __version__,
    ) -> None:
        """Remember the permissions; nothing is read before the first question.

        Args:
            allow: ``NAME`` or ``NAME@DISTRIBUTION`` that may load, None for all.
            deny: the same, that may not.
            allow_paths: accept ``module:Class`` for a name.
        """
        self._allow = allow
        self._deny = deny
        self._allow_paths = allow_paths
        named = environment.get(ENVIRONMENT)
        self._named = None if named is None else named.replace(",", " ").split()
        self._find = find
        self.catalogue = catalogue
        self._version = version
        self._loaded: dict[tuple[str, str], Any] = {}

    def names(self, kind: str, /) -> list[str]:
        """Installed names of a kind, sorted."""
        return sorted({offer.name for offer in self.offers(kind)})

    def load(self, kind: str, name: str, /, *, anyway: bool = False) -> Any:
        """Return the class (for ``ops``, ``observers`` and ``commands``: the object) behind a name.

        Args:
            name: ``NAME``, ``NAME@DISTRIBUTION`` or, where allowed, ``module:Class``.
            anyway: also when it cannot work on this machine.

        Raises:
            PluginError: one of its subclasses, each message with the remedy.
        """
        found = self._loaded.get((kind, name))
        if found is None:
            found = self._loaded[kind, name] = self.import_offer(self._offer(kind, name))
        what = f"{KINDS[kind].noun} {name!r}"
        if not anyway and (reason := unavailable(found, what)):
            raise PluginUnavailable(f"{what} is unavailable here, because {reason}")
        return found

    def offers(self, kind: str, /) -> list[Offer]:
        """Everything installed of a kind, allowed or not, without importing any of it."""
        offers = [offer for offer in self._find() if offer.kind == kind]
        targets = {offer.target for offer in offers}
        # What the core itself brings is there even where the core was never installed.
        brought = [Offer(kind, entry.name, entry.object) for entry in self._entries(kind).values()]
        offers += [offer for offer in brought if offer.core and offer.target not in targets]
        for finder in (offer for offer in self._find() if offer.kind == FINDERS):
            if self.refusal(finder) is None:
                for name, target in self._call(finder, kind).items():
                    offers.append(Offer(kind, name, target, source=finder.dist))
        return offers

    def _call(self, finder: Offer, kind: str) -> Mapping[str, str]:
        try:
            names: Mapping[str, str] = resolve_name(finder.target)(kind)
        except Exception as error:  # named boundary: plugin code, loaded and called
            raise PluginLoadError(
                f"finder {finder.name!r} {finder.origin} failed: {said(error)}; remove it or leave it out of {ENVIRONMENT}"
            ) from error
        return names

    def _offer(self, kind: str, wanted: str) -> Offer:
        noun = KINDS[kind].noun
        if ":" in wanted:
            if not self._allow_paths:
                raise PluginDenied(
                    f"{noun} {wanted!r} is a path, which runs any code; set plugins.allow_paths: true to allow that"
                )
            offer = Offer(kind, wanted, wanted, source="path")
            if refusal := self.refusal(offer):
                raise PluginDenied(f"{noun} {wanted!r} is {refusal}")
            return offer
        name, _, dist = wanted.partition("@")
        offers = [offer for offer in self.offers(kind) if offer.name == name]
        if dist and (everywhere := offers):
            offers = [offer for offer in offers if _normal(offer.dist) == _normal(dist)]
            if not offers:
                raise PluginNotFound(
                    f"no {noun} {name!r} in distribution {dist!r}; it is offered by {joined(o.dist for o in everywhere)}"
                )
        if not offers:
            raise self._missing(kind, name)
        # One target is one piece of code, however many leftovers of an installation name it.
        allowed = [*{o.target: o for o in offers if self.refusal(o) is None}.values()]
        if not allowed:
            raise PluginDenied(f"{noun} {name!r} is installed but {self.refusal(offers[0])}")
        if len(allowed) > 1:
            choices = sorted(offer.dist for offer in allowed)
            raise PluginConflict(
                f"{noun} {name!r} is offered by {joined(choices)}; write {joined((f'{name}@{d}' for d in choices), 'or')}"
            )
        return allowed[0]

    def refusal(self, offer: Offer, /) -> str | None:
        """Tell why an offer may not load, or None."""

        def among(names: Sequence[str]) -> bool:
            parts = [name.partition("@") for name in names]
            dists = ("", _normal(offer.dist))
            return any(name == offer.name and _normal(dist) in dists for name, _, dist in parts)

        if offer.kind == "ops":  # chosen by ``lmcache_core.ops``, which asks nobody
            return None
        # By a configuration: a command is chosen before one is read.
        named = offer.kind != "commands"
        if named and among(self._deny):
            return "denied by plugins.deny; remove it there"
        if offer.core:
            return None
        if named and self._allow is not None and not among(self._allow):
            return f"not in plugins.allow ({', '.join(self._allow) or 'empty'}); add it there"
        if self._named is not None and not among(self._named):
            return f"not named by {ENVIRONMENT} ({', '.join(self._named) or 'empty'}); add it there"
        return None

    def _missing(self, kind: str, name: str) -> PluginNotFound:
        noun = KINDS[kind].noun
        entries = self._entries(kind)
        if (entry := entries.get(name)) is not None:
            if entry.status == "retired":
                return PluginNotFound(f"{noun} {name!r} is retired: {entry.reason}")
            return PluginNotFound(f"{noun} {name!r} is not installed; {self.command(entry)}")
        here = self.names(kind)
        active = {known for known, entry in entries.items() if entry.status != "retired"}
        if near := get_close_matches(name, [*here, *active], 1):
            hint = "" if near[0] in here else f" ({self.command(entries[near[0]])})"
            return PluginNotFound(f"no {noun} {name!r}; did you mean {near[0]!r}{hint}?")
        return PluginNotFound(
            f"no {noun} {name!r}; installed: {', '.join(here) or 'none'}; `lmcache plugins` lists more"
        )

    def _entries(self, kind: str) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.catalogue if entry.kind == kind}

    def command(self, entry: Entry, /) -> str:
        """Tell how to install a name of the catalogue from where this core came from."""
        return install(entry.extra, self._version)

    def import_offer(self, offer: Offer, /) -> Any:
        """Import one offer and check that it is what it says; permissions are not asked.

        Raises:
            PluginLoadError, PluginIncompatible: as ``load``.
        """
        kind = KINDS[offer.kind]
        what = f"{kind.noun} {offer.name!r} {offer.origin}"
        try:
            found = resolve_name(offer.target)
        except Exception as error:  # named boundary: a plugin may raise anything when imported
            entry = self._entries(offer.kind).get(offer.name)
            needs = entry.needs if entry else ""
            remedy = f"it needs {needs}" if needs else f"repair or remove {offer.dist}"
            raise PluginLoadError(f"{what} failed to import: {said(error)}; {remedy}") from error
        spoken = getattr(found, "plugin_api", PLUGIN_API)
        if spoken != PLUGIN_API:
            raise PluginIncompatible(
                f"{what} speaks plugin API {spoken}, this core {PLUGIN_API}; install a version made for {PLUGIN_API}"
            )
        if fault := _unfit(found, kind):
            raise PluginIncompatible(f"{what} is no {kind.noun}: {offer.target} {fault}")
        return found


def install(extra: str, version: str = __version__, /) -> str:
    """The command that installs an extra; a version with a local label was never published: a checkout."""
    if "+" in version:
        return f"pip install -c constraints.txt -e '.[{extra}]'"
    return f"pip install 'lmcache[{extra}]'"


def unavailable(found: Any, what: str, /) -> str | None:
    """Ask a plugin why it cannot work here; None when it can or does not say."""
    ask = getattr(found, "unavailable", None)
    if ask is None:
        return None
    try:
        reason: str | None = ask()
    except Exception as error:  # named boundary: plugin code
        problem = f"{what} failed to say whether it works here: {said(error)}"
        raise PluginLoadError(problem) from error
    return reason


def _unfit(found: Any, kind: Kind) -> str:
    """What keeps an object from being a plugin of a kind, or ``""``."""
    if kind is KINDS["observers"] and not callable(getattr(found, "observe", None)):
        return "has no observe(event)"
    if kind.bases and not (isinstance(found, type) and issubclass(found, kind.bases)):
        names = " or ".join(base.__name__ for base in kind.bases)
        return f"is not a subclass of {names}"
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        return f"lacks {', '.join(missing)}"
    if kind.configured and not is_dataclass(getattr(found, "config_type", None)):
        return "has no dataclass as its config_type"
    return ""


def said(error: BaseException, /) -> str:
    """One line of an error: its type and the first line of its text."""
    return f"{type(error).__name__}: {error}".split("\n", 1)[0].removesuffix(": ")


def _normal(dist: str) -> str:
    return dist.lower().replace("_", "-").replace(".", "-")


def joined(names: Iterable[str], word: str = "and", /) -> str:
    """``a, b and c``; choices (``or``) are quoted."""
    *first, last = [repr(name) if word == "or" else name for name in names]
    return f"{', '.join(first)} {word} {last}" if first else last
