"""``lmcache plugins``: list what is there, verify a backend, start a new one."""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from lmcache_core.cli.config import Json
from lmcache_core.cli.output import print_records, remark
from lmcache_core.cli.scaffold import scaffold
from lmcache_core.config import permissions
from lmcache_core.registry import KINDS, Offer, Registry, install, joined, unavailable
from lmcache_core.spi import Capabilities, PluginIncompatible, PluginLoadError, PluginUnavailable

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    invoke_without_command=True,
    help="List, verify and start plugins.",
)
FAULTS = ("broken", "incompatible", "conflicting")


@dataclass(frozen=True, slots=True)
class Listed:
    """One line. ``state`` is one of: installed, ready, unavailable, broken, incompatible, conflicting,
    denied, not installed, retired; those from ``ready`` to ``incompatible`` are known after asking only.
    Of a plugin that is ready, ``reason`` is what its class method ``remark`` says, if it has one.
    """

    kind: str
    name: str
    dist: str
    version: str
    state: str
    reason: str = ""
    capabilities: tuple[str, ...] = ()


@app.callback()
def plugins(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Option("--config", help="Whose permissions to apply.")
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Import each plugin and ask whether it works here.")
    ] = False,
    as_json: Json = False,
) -> int:
    """List the plugins that are installed or could be."""
    if context.invoked_subcommand is not None:
        return 0
    lines = listing(permissions(file), probe=probe)
    print_records(lines, as_json=as_json)
    if not (probe or as_json):
        remark("nothing was imported; --probe asks each plugin whether it works here")
    return int(any(line.state in FAULTS for line in lines))


@app.command()
def verify(
    name: Annotated[str, typer.Argument(help="A backend: NAME or NAME@DISTRIBUTION.")],
    file: Annotated[
        Path | None, typer.Option("--config", help="File with a tier of this plugin.")
    ] = None,
    only: Annotated[str | None, typer.Option("--only", help="One law, such as B5.")] = None,
    as_json: Json = False,
) -> int:
    """Run the conformance kit against a backend; writes conformance.json."""
    try:
        run = importlib.import_module("lmcache_core.testing.verify").verify
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lmcache_core"):
            raise
        raise PluginUnavailable(f"the kit needs {error.name}: {install('testing')}") from error
    return int(run(name, config=file, only=only, as_json=as_json))


@app.command()
def new(
    kind: Annotated[str, typer.Argument(help="What to start: backend.")],
    name: Annotated[str, typer.Argument(help="Its name in configuration, such as tape.")],
    into: Annotated[Path, typer.Option("--into", help="Folder to make it in.")] = Path(),
) -> int:
    """Start a plugin from the template, with its tests."""
    folder = scaffold(kind, name, into)
    install_it = f"pip install --no-deps --no-build-isolation -e {folder}"
    remark(f"made {folder}; next: {install_it} && lmcache plugins verify {name}")
    print(folder)
    return 0


def listing(registry: Registry, /, *, probe: bool = False) -> list[Listed]:
    """Everything installed or in the catalogue; with ``probe`` each allowed plugin is imported and asked."""
    lines = []
    for kind in KINDS:
        offers = sorted(registry.offers(kind), key=lambda offer: (offer.name, offer.target))
        lines += [_line(registry, offer, offers, probe) for offer in offers]
    have = {(line.kind, line.name) for line in lines}
    for entry in registry.catalogue:
        if entry.kind in KINDS and (entry.kind, entry.name) not in have:
            state, reason = "not installed", registry.command(entry)
            if entry.status == "retired":
                state, reason = "retired", entry.reason
            lines.append(Listed(entry.kind, entry.name, entry.dist, "", state, reason))
    return lines


def _line(registry: Registry, offer: Offer, offers: list[Offer], probe: bool) -> Listed:
    rivals = [
        o for o in offers
        if o.name == offer.name and o.target != offer.target and registry.refusal(o) is None
    ]  # fmt: skip
    state, reason = "installed", ""
    capabilities: tuple[str, ...] = ()
    if refusal := registry.refusal(offer):
        state, reason = "denied", refusal
    elif rivals:
        state, reason = "conflicting", f"also offered by {joined(o.dist for o in rivals)}"
    elif probe:
        try:
            found = registry.import_offer(offer)
            reason = unavailable(found, f"{offer.kind} {offer.name!r}") or ""
            state, capabilities = "unavailable" if reason else "ready", capabilities_of(found)
            if not reason and callable(remark_of := getattr(found, "remark", None)):
                reason = remark_of()
        except PluginIncompatible as error:
            state, reason = "incompatible", str(error)
        except PluginLoadError as error:
            state, reason = "broken", str(error)
    return Listed(offer.kind, offer.name, offer.dist, offer.version, state, reason, capabilities)


def capabilities_of(found: Any, /) -> tuple[str, ...]:
    """What a class declares for all its instances; empty when only instances know."""
    if isinstance(lossless := getattr(found, "lossless", None), bool):  # a serde
        return ("lossless",) if lossless else (f"lossy: {found.error_bound}",)
    declared = getattr(found, "capabilities", None)
    if not isinstance(declared, Capabilities):
        return ()
    plain = asdict(Capabilities())
    changed = {name: v for name, v in asdict(declared).items() if v != plain[name]}
    return tuple(name if v is True else f"{name}={_text(v)}" for name, v in changed.items())


def _text(value: Any) -> str:
    if isinstance(value, frozenset):
        return "+".join(sorted(map(_text, value)))
    return str(getattr(value, "value", value))
