"""The texts that follow from the catalogue. Pure functions; .ci/catalogue.py writes what they return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOT_DIST = "lmcache"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One table of plugins.toml."""

    kind: str
    name: str
    object: str
    help: str = ""
    dist: str = ROOT_DIST
    path: str = "."
    extra: str = ""
    status: str = "experimental"
    reason: str = ""
    needs: str = ""
    service: str = ""
    vendor: bool = False
    rivals: list[str] = field(default_factory=list)
    variants: dict[str, str] = field(default_factory=dict)

    @property
    def package(self) -> str:
        """Top import package of the object."""
        return self.object.split(":")[0].split(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """plugins.toml, read."""

    version: str
    rows: tuple[Row, ...]

    @property
    def distributions(self) -> list[tuple[str, str, str]]:
        """(dist, path, extra) of every plugin distribution, once, in file order."""
        outside = [row for row in self.rows if row.dist != ROOT_DIST and row.status != "retired"]
        return list(dict.fromkeys((row.dist, row.path, row.extra) for row in outside))

    @property
    def dists(self) -> list[str]:
        """Names of the plugin distributions."""
        return list(dict.fromkeys(dist for dist, _, _ in self.distributions))

    @property
    def paths(self) -> list[str]:
        """Folders of the plugin distributions."""
        return list(dict.fromkeys(path for _, path, _ in self.distributions))

    @property
    def packages(self) -> list[str]:
        """Import packages of the plugin distributions."""
        outside = [row for row in self.rows if row.dist != ROOT_DIST and row.status != "retired"]
        return list(dict.fromkeys(row.package for row in outside))


def extras(catalogue: Catalogue) -> str:
    """Extras: one per name, or its variants, plus ``all``, which takes the first of them."""
    lines, everything = [], []
    vendor = {row.dist for row in catalogue.rows if row.vendor}
    variants = {row.dist: row.variants for row in catalogue.rows if row.variants}
    for dist, _, extra in catalogue.distributions:
        chosen = {name: f"{dist}[{own}]" for name, own in variants.get(dist, {}).items()}
        chosen = chosen or {extra: dist}
        lines += [f'{name} = ["{each}=={catalogue.version}"]\n' for name, each in chosen.items()]
        if dist not in vendor:
            everything.append(next(iter(chosen.values())))
    body = "".join(f'    "{dist}=={catalogue.version}",\n' for dist in dict.fromkeys(everything))
    return "".join(lines) + f"all = [\n{body}]\n"


def entry_points(catalogue: Catalogue) -> str:
    """Entry points of the root distribution."""
    out: dict[str, list[str]] = {}
    for row in catalogue.rows:
        if row.dist == ROOT_DIST and row.status != "retired":
            out.setdefault(row.kind, []).append(f'{row.name} = "{row.object}"\n')
    return "\n".join(
        f'[project.entry-points."lmcache_core.{kind}"]\n' + "".join(lines)
        for kind, lines in out.items()
    )


def _listed(names: list[str], indent: str = "    ") -> str:
    return "".join(f'{indent}"{name}",\n' for name in names)


def linter_roots(catalogue: Catalogue) -> str:
    """Root packages of import-linter."""
    return "root_packages = [\n" + _listed(["lmcache_core", *catalogue.packages, "lmcache"]) + "]\n"


def linter_plugins(catalogue: Catalogue) -> str:
    """Contracts whose lists are the plugin packages."""
    packages = catalogue.packages
    contracts = [
        "[[tool.importlinter.contracts]]\n"
        'name = "the core imports no plugin, no tensor library"\n'
        'type = "forbidden"\n'
        'source_modules = ["lmcache_core"]\n'
        "forbidden_modules = [\n" + _listed(["torch", "numpy", "lmcache", *packages]) + "]\n"
    ]
    if len(packages) > 1:
        contracts.append(
            "[[tool.importlinter.contracts]]\n"
            'name = "plugins never import each other"\n'
            'type = "independence"\n'
            "modules = [\n" + _listed(packages) + "]\n"
        )
    plugins = list(dict.fromkeys(row.package for row in _plugins(catalogue)))
    if plugins:
        contracts.append(
            "[[tool.importlinter.contracts]]\n"
            'name = "plugins import the contract and the byte operations, nothing else of the core"\n'
            'type = "forbidden"\n'
            "source_modules = [\n" + _listed(plugins) + "]\n"
            "forbidden_modules = [\n"
            + _listed(["lmcache", *_closed_core()])
            + "]\n"
            + _commands(catalogue)
        )
    return "\n".join(contracts)


def _commands(catalogue: Catalogue) -> str:
    """A command of the CLI stands on the core as the CLI does: its module, and ``checking`` beside it."""
    rows = [row for row in _plugins(catalogue) if row.kind == "commands"]
    pairs = [f"{row.object.split(':')[0]} -> lmcache_core.**" for row in rows]
    pairs += [
        f"{row.package}.checking -> lmcache_core.frame"
        for row in rows
        if (ROOT / row.path / "src" / row.package / "checking.py").exists()
    ]
    # A tier that is another daemon stands on the daemon's client.
    pairs += [
        f"{row.package}.client -> lmcache_core.**"
        for row in _plugins(catalogue)
        if row.name == "lmcache"
    ]
    # A tier whose store is a server starts one for tests, the demo and benchmarks.
    pairs += [
        f"{package}.serving -> lmcache_core.testing.services"
        for package, path in dict.fromkeys((row.package, row.path) for row in _plugins(catalogue))
        if (ROOT / path / "src" / package / "serving.py").exists()
    ]
    return "ignore_imports = [\n" + _listed(pairs) + "]\n" if pairs else ""


def _plugins(catalogue: Catalogue) -> list[Row]:
    """What may use the contract only: neither engines nor the server, which stand on the whole core."""
    rows = _outside(catalogue)
    whole = {"server", *(row.path for row in rows if row.kind == "engines")}
    return [row for row in rows if row.path not in whole]


def _outside(catalogue: Catalogue) -> list[Row]:
    return [row for row in catalogue.rows if row.dist != ROOT_DIST and row.status != "retired"]


def _closed_core() -> list[str]:
    """Modules of the core that are not the plugins' business."""
    open_to_all = ("spi", "ops", "codecs", "__init__")
    found = (ROOT / "lmcache_core").iterdir()
    names = {path.stem for path in found if path.suffix == ".py" or (path / "__init__.py").exists()}
    return [f"lmcache_core.{name}" for name in sorted(names.difference(open_to_all))]


def siblings(catalogue: Catalogue) -> str:
    """Constraints: first-party distributions are folders of this tree, never names on an index."""
    lines = [f"{dist} @ file://${{PWD}}/{path}\n" for dist, path, _ in catalogue.distributions]
    return f"{ROOT_DIST}=={catalogue.version}\n" + "".join(dict.fromkeys(lines))


def module(catalogue: Catalogue) -> str:
    """The generated module: no parsing at run time."""
    fields = (
        "kind",
        "name",
        "dist",
        "path",
        "object",
        "help",
        "extra",
        "status",
        "reason",
        "needs",
        "service",
    )
    entries = []
    for row in catalogue.rows:
        values = {field: getattr(row, field) for field in fields}
        body = "".join(f"        {f}={_quote(values[f])},\n" for f in fields if values[f])
        if row.rivals:
            body += f"        rivals=(\n{_listed(row.rivals, ' ' * 12)}        ),\n"
        entries.append(f"    Entry(\n{body}    ),\n")
    rows = f"(\n{''.join(entries)})" if entries else "()"
    return f'''"""GENERATED from plugins.toml by .ci/catalogue.py; edit that file and run `make catalogue`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One first-party name: what ships it, where it lies in a checkout, what it needs.

    ``kind`` is the end of the entry-point group ``lmcache_core.KIND``. ``status`` is ``experimental``,
    ``stable`` or ``retired``; a retired name has a ``reason``. ``help`` is what a command does. Of the
    distributions ``rivals`` at most one may be installed. Empty text means none.
    """

    kind: str
    name: str
    dist: str
    path: str
    object: str
    help: str = ""
    extra: str = ""
    status: str = "experimental"
    reason: str = ""
    needs: str = ""
    service: str = ""
    rivals: tuple[str, ...] = ()


CATALOGUE: tuple[Entry, ...] = {rows}
'''


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def table(catalogue: Catalogue) -> str:
    """The plugin table in Markdown."""
    lines = [
        "| Kind | Name | Distribution | Install | Status | Needs |\n",
        "| --- | --- | --- | --- | --- | --- |\n",
    ]
    for row in catalogue.rows:
        install = f"`lmcache[{row.extra}]`" if row.extra else "in the core"
        lines.append(
            f"| {row.kind} | `{row.name}` | {row.dist} | {install} | {row.status} "
            f"| {row.reason or row.needs or 'nothing'} |\n"
        )
    return "".join(lines)


def summary(catalogue: Catalogue) -> str:
    """One line per distribution, for the README."""
    lines = [
        "| Distribution | Offers | Install | Needs |\n",
        "| --- | --- | --- | --- |\n",
    ]
    for dist in (ROOT_DIST, *catalogue.dists):
        rows = [row for row in catalogue.rows if row.dist == dist and row.status != "retired"]
        kinds = dict.fromkeys(row.kind for row in rows)
        offers = "; ".join(
            f"{kind.replace('_', ' ')}: " + ", ".join(f"`{r.name}`" for r in rows if r.kind == kind)
            for kind in kinds
        )
        install = f"`.[{rows[0].extra}]`" if rows and rows[0].extra else "`.`"
        needs = next((row.needs for row in rows if row.needs), "nothing else")
        lines.append(f"| {dist} | {offers} | {install} | {needs} |\n")
    return "".join(lines)


def page(catalogue: Catalogue) -> str:
    """docs/reference/plugins.md."""
    return (
        "# Plugins in this tree\n\n"
        "Generated from `plugins.toml`; run `make catalogue` after a change there.\n"
        "`lmcache plugins` prints what is installed here and in which state.\n\n"
    ) + table(catalogue)


RENDERERS: dict[str, Callable[[Catalogue], str]] = {
    "lmcache_core/_catalogue.py": module,
    "docs/reference/plugins.md": page,
}


def blocks(catalogue: Catalogue) -> dict[str, dict[str, str]]:
    """Generated blocks inside files that people edit."""
    return {
        "pyproject.toml": {
            "extras": extras(catalogue),
            "entry points": entry_points(catalogue),
            "linter roots": linter_roots(catalogue),
            "linter plugins": linter_plugins(catalogue),
        },
        "constraints.txt": {"siblings": siblings(catalogue)},
        "README.md": {"plugin table": summary(catalogue)},
    }
