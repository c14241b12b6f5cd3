"""Write everything that follows from plugins.toml, or check that it is up to date.

    python .ci/catalogue.py sync       write the generated blocks and files
    python .ci/catalogue.py --check    fail with a diff and the command to run
    python .ci/catalogue.py list       one line per distribution: dist, path, extra

What is generated: extras, core entry points and linter lists in the root pyproject.toml; the sibling part
of constraints.txt; lmcache_core/_catalogue.py; the plugin tables of README.md and docs/reference.
"""

from __future__ import annotations

import difflib
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from catalogue_render import RENDERERS, Catalogue, Row, blocks

ROOT = Path(__file__).resolve().parent.parent
ROOT_DIST = "lmcache"
STATUSES = ("experimental", "stable", "retired")
KINDS = (
    "backends",
    "serdes",
    "gpu_connectors",
    "policies",
    "wrappers",
    "channels",
    "key_managers",
    "ops",
    "observers",
    "commands",
    "engines",  # names a package that an engine imports; no entry-point group
)
NO_ENTRY_POINT = ("engines",)
NORMAL_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
BEGIN, END = "generated from plugins.toml: ", "end generated: "


class CatalogueError(Exception):
    """plugins.toml, a folder and a pyproject.toml disagree."""


def read(root: Path = ROOT) -> Catalogue:
    """Read plugins.toml.

    Raises:
        CatalogueError: an unknown kind, key or status, a missing key, or clashing extras.
    """
    data = tomllib.loads((root / "plugins.toml").read_text())
    version = data.pop("version")
    rows: list[Row] = []
    for kind, names in data.items():
        if kind not in KINDS:
            raise CatalogueError(f"unknown kind [{kind}]; known: {', '.join(KINDS)}")
        for name, keys in names.items():
            try:
                rows.append(Row(kind=kind, name=name, **keys))
            except TypeError as error:
                raise CatalogueError(f"[{kind}.{name}]: {error}") from error
    for row in rows:
        where = f"[{row.kind}.{row.name}]"
        if row.status not in STATUSES:
            raise CatalogueError(f"{where}: status {row.status!r} is none of {', '.join(STATUSES)}")
        if (row.status == "retired") != bool(row.reason):
            raise CatalogueError(f"{where}: a retired name, and only that, gives a reason")
        if (row.dist == ROOT_DIST) == bool(row.extra) and row.status != "retired":
            raise CatalogueError(
                f"{where}: an extra is for names outside {ROOT_DIST}, and needed there"
            )
        if row.extra and not NORMAL_NAME.fullmatch(row.extra):
            raise CatalogueError(f"{where}: extra {row.extra!r} is not in normalised form")
        if row.extra in ("all", "testing", "dev"):
            raise CatalogueError(f"{where}: extra {row.extra!r} is taken")
    for attribute, other in (("extra", "dist"), ("dist", "path"), ("path", "dist")):
        seen: dict[str, str] = {}
        for row in rows:
            mine, theirs = getattr(row, attribute), getattr(row, other)
            if mine and seen.setdefault(mine, theirs) != theirs:
                raise CatalogueError(
                    f"{attribute} {mine!r} belongs to {seen[mine]!r} and {theirs!r}; one only"
                )
    return Catalogue(version=version, rows=tuple(rows))


def substitute(text: str, name: str, body: str, where: str) -> str:
    """Replace what lies between the marked lines of block ``name``."""
    pattern = re.compile(
        rf"(^[^\n]*{re.escape(BEGIN + name)}\b[^\n]*\n).*?(^[^\n]*{re.escape(END + name)}\b[^\n]*$)",
        re.M | re.S,
    )
    if not pattern.search(text):
        raise CatalogueError(f"{where}: no block marked {BEGIN + name!r} .. {END + name!r}")
    return pattern.sub(lambda match: match[1] + body + match[2], text)


def relabel(text: str, catalogue: Catalogue) -> str:
    """Set the version of a first-party pyproject and its exact pins of siblings."""
    text = re.sub(
        r'^version = "[^"]*"$', f'version = "{catalogue.version}"', text, count=1, flags=re.M
    )
    for dist in (ROOT_DIST, *catalogue.dists):
        text = re.sub(
            rf'"{re.escape(dist)}(\[[a-z0-9,-]+\])?\s*==[^"]*"',
            lambda match, dist=dist: f'"{dist}{match[1] or ""}=={catalogue.version}"',  # type: ignore[misc]
            text,
        )
    return text


def generate(catalogue: Catalogue, root: Path = ROOT) -> dict[Path, str]:
    """Every generated file with the text it should have."""
    out: dict[Path, str] = {}
    for path, render in RENDERERS.items():
        out[root / path] = render(catalogue)
    for path, bodies in blocks(catalogue).items():
        text = (root / path).read_text()
        for name, body in bodies.items():
            text = substitute(text, name, body, path)
        out[root / path] = text
    for path in ("pyproject.toml", *(f"{path}/pyproject.toml" for path in catalogue.paths)):
        if (root / path).exists():
            out[root / path] = relabel(out.get(root / path) or (root / path).read_text(), catalogue)
    init = root / "lmcache_core/__init__.py"
    out[init] = re.sub(
        r'^__version__ = "[^"]*"$',
        f'__version__ = "{catalogue.version}"',
        init.read_text(),
        flags=re.M,
    )
    return out


@dataclass(frozen=True, slots=True)
class Found:
    """What a folder says about itself."""

    dist: str
    entry_points: dict[str, dict[str, str]]
    classifiers: list[str]


def inspect(folder: Path) -> Found:
    """Read a folder's pyproject.toml."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return Found(project["name"], project.get("entry-points", {}), project.get("classifiers", []))


def disagreements(catalogue: Catalogue, root: Path = ROOT) -> list[str]:
    """Where catalogue, folders and entry points differ, in all three directions."""
    wrong: list[str] = []
    active = [row for row in catalogue.rows if row.status != "retired"]
    for path in (".", *catalogue.paths):
        folder = root / path
        if not (folder / "pyproject.toml").exists():
            wrong.append(f"{path}: in plugins.toml, but there is no {path}/pyproject.toml")
            continue
        found = inspect(folder)
        mine = [row for row in active if row.path == path]
        wrong += [
            f"{path}: pyproject says {found.dist!r}, plugins.toml {row.dist!r}"
            for row in mine
            if row.dist != found.dist
        ]
        if "Private :: Do Not Upload" not in found.classifiers:
            wrong.append(f"{path}: lacks the classifier 'Private :: Do Not Upload'")
        if path != "." and not (folder / "README.md").exists():
            wrong.append(f"{path}: lacks README.md")
        if path != "." and not any(folder.rglob("py.typed")):
            wrong.append(f"{path}: lacks py.typed")
        declared = {
            (group.removeprefix("lmcache_core."), name, target)
            for group, names in found.entry_points.items()
            if group.startswith("lmcache_core.")
            for name, target in names.items()
        }
        listed = {(r.kind, r.name, r.object) for r in mine if r.kind not in NO_ENTRY_POINT}
        wrong += [
            f"{path}: entry point {item} is not in plugins.toml" for item in declared - listed
        ]
        wrong += [
            f"{path}: plugins.toml lists {item}, no such entry point" for item in listed - declared
        ]
    for pyproject in sorted(root.glob("*/pyproject.toml")) + sorted(
        root.glob("*/*/pyproject.toml")
    ):
        path = pyproject.parent.relative_to(root).as_posix()
        if path.split("/")[0] not in ("examples", "build") and path not in catalogue.paths:
            wrong.append(f"{path}: has a pyproject.toml but is not in plugins.toml")
    return wrong


def main(arguments: list[str]) -> int:
    """Run one command; 0 good, 1 findings, 2 usage."""
    command = arguments[0] if arguments else "--check"
    if command not in ("sync", "--check", "list"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        catalogue = read()
        if command == "list":
            for dist, path, extra in catalogue.distributions:
                print(dist, path, extra)
            return 0
        wanted = generate(catalogue)
    except CatalogueError as error:
        print(f"catalogue: {error}", file=sys.stderr)
        return 1
    stale = 0
    for file, text in wanted.items():
        have = file.read_text() if file.exists() else ""
        if have == text:
            continue
        stale += 1
        name = file.relative_to(ROOT).as_posix()
        if command == "sync":
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            print(f"catalogue: wrote {name}")
        else:
            sys.stdout.writelines(
                difflib.unified_diff(
                    have.splitlines(True), text.splitlines(True), name, f"{name} (generated)"
                )
            )
    wrong = disagreements(catalogue)
    for line in wrong:
        print(f"catalogue: {line}", file=sys.stderr)
    if command == "--check" and stale:
        print("catalogue: out of date; run `make catalogue`", file=sys.stderr)
    if wrong or (command == "--check" and stale):
        return 1
    print(f"catalogue: {len(catalogue.rows)} names, {len(catalogue.dists) + 1} distributions agree")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
