"""Catalogue, folders, entry points and everything generated agree; what does not is named."""

import re
from importlib.metadata import distributions, entry_points
from pathlib import Path

import catalogue
import pytest
from catalogue import CatalogueError

from lmcache_core._catalogue import CATALOGUE
from lmcache_core.registry import KINDS


def write(folder: Path, text: str) -> Path:
    (folder / "plugins.toml").write_text(f'version = "1"\n{text}')
    return folder


PLUGIN = """
[backends.{name}]
dist = "lmcache-backend-{dist}"
path = "backends/{dist}"
object = "lmcache_backend_{dist}:Backend"
extra = "{extra}"
"""


def test_everything_generated_is_up_to_date(root: Path) -> None:
    wanted = catalogue.generate(catalogue.read())
    stale = [path for path, text in wanted.items() if path.read_text() != text]
    assert stale == [], "run `make catalogue`"


def test_catalogue_folders_and_entry_points_agree() -> None:
    assert catalogue.disagreements(catalogue.read()) == []


def test_installed_entry_points_are_those_of_the_catalogue() -> None:
    ours = {dist.name for dist in distributions() if dist.name.startswith("lmcache")}
    for entry in CATALOGUE:
        if entry.dist not in ours or entry.status == "retired" or entry.kind == "engines":
            continue
        found = entry_points(group=f"lmcache_core.{entry.kind}", name=entry.name)
        assert entry.object in {point.value for point in found}, f"{entry.name}: run `make setup`"


def test_help_of_a_command_begins_as_the_command_itself_says(root: Path) -> None:
    """The page is made from the commands; to import them here would cost seconds."""
    page = (root / "docs/reference/cli.md").read_text()
    own = dict(re.findall(r"^## lmcache (.+)\n\n```text\nUsage: .*\n\n((?:  .*\n)+)", page, re.M))
    for entry in CATALOGUE:
        if entry.kind == "commands":
            said = own.get(entry.name) or own[entry.name.replace("-", " ")]
            assert entry.help.endswith(".")
            assert " ".join(said.split()).startswith(entry.help[:-1]), entry.name


def test_every_kind_is_one_the_registry_knows() -> None:
    assert {entry.kind for entry in CATALOGUE} <= {*KINDS, "engines"}


def test_the_generated_module_parses_nothing_at_run_time(root: Path) -> None:
    text = (root / "lmcache_core/_catalogue.py").read_text()
    assert re.findall(r"^(?:from|import) (\S+)", text, re.M) == ["dataclasses"]


def test_one_distribution_may_offer_several_names(tmp_path: Path) -> None:
    twins = PLUGIN.format(name="disk", dist="disk", extra="disk")
    twins += PLUGIN.format(name="fs", dist="disk", extra="disk")
    read = catalogue.read(write(tmp_path, twins))
    assert read.distributions == [("lmcache-backend-disk", "backends/disk", "disk")]
    assert len(read.rows) == 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[backend.x]\n", "unknown kind"),
        ('[backends.x]\nobject = "m:C"\ndits = "d"\n', "dits"),
        ("[backends.x]\n", "object"),
        ('[policies.x]\nobject = "m:C"\nstatus = "good"\n', "status 'good'"),
        ('[policies.x]\nobject = "m:C"\nstatus = "retired"\n', "gives a reason"),
        ('[policies.x]\nobject = "m:C"\nextra = "x"\n', "an extra is for names outside"),
        (PLUGIN.format(name="x", dist="x", extra=""), "an extra is for names outside"),
        (PLUGIN.format(name="x", dist="x", extra="a_b"), "normalised form"),
        (PLUGIN.format(name="x", dist="x", extra="all"), "taken"),
        (
            PLUGIN.format(name="x", dist="x", extra="e")
            + PLUGIN.format(name="y", dist="y", extra="e"),
            "extra 'e' belongs to",
        ),
    ],
)
def test_a_wrong_catalogue_is_refused_with_the_reason(
    tmp_path: Path, text: str, complaint: str
) -> None:
    with pytest.raises(CatalogueError, match=complaint):
        catalogue.read(write(tmp_path, text))


def test_each_way_to_disagree_is_reported(tmp_path: Path) -> None:
    write(tmp_path, PLUGIN.format(name="x", dist="x", extra="x"))
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "lmcache"\nclassifiers = []\n')
    for folder in ("backends/x", "backends/y"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "pyproject.toml").write_text(
            '[project]\nname = "lmcache-other"\n'
            '[project.entry-points."lmcache_core.backends"]\nz = "m:Z"\n'
        )
    text = "\n".join(catalogue.disagreements(catalogue.read(tmp_path), tmp_path))
    for complaint in (
        r"pyproject says 'lmcache-other'",
        "'z', 'm:Z'\\) is not in plugins.toml",
        r"no such entry point",
        r"backends/x: lacks README.md",
        r"backends/x: lacks py.typed",
        r"backends/x: lacks the classifier",
        r"\.: lacks the classifier",
        r"backends/y: has a pyproject.toml but is not in plugins.toml",
    ):
        assert re.search(complaint, text), complaint


def test_a_new_version_reaches_every_pin_of_a_sibling() -> None:
    read = catalogue.read()
    changed = catalogue.Catalogue(version="2027.1.0+tree", rows=read.rows)
    text = 'version = "1"\ndependencies = ["lmcache==1", "lmcache[testing]==1", "xxhash==1"]\n'
    assert catalogue.relabel(text, changed) == (
        'version = "2027.1.0+tree"\n'
        'dependencies = ["lmcache==2027.1.0+tree", "lmcache[testing]==2027.1.0+tree", "xxhash==1"]\n'
    )
