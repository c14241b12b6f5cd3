"""What the pages show works: YAML is read by the real loader, Python and the how-to are run.

A block that is not run has the line ``<!-- not run: REASON -->`` above it.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import docs
from lmcache_core.config import load

BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>.+?) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)```", re.S
)


class Block(NamedTuple):
    """One fenced block of a page."""

    where: str
    language: str
    code: str
    reason: str | None


def blocks() -> list[Block]:
    """Every block of every page; an outside example's pages belong to a distribution that is not installed."""
    return [
        Block(
            f"{page.relative_to(docs.ROOT)}:{page.read_text()[: match.start()].count(chr(10)) + 1}",
            match["language"],
            match["code"],
            match["reason"],
        )
        for page in docs.pages()
        if not page.is_relative_to(docs.ROOT / "examples")
        for match in BLOCK.finditer(page.read_text())
    ]


def of(language: str) -> list[Block]:
    return [block for block in blocks() if block.language == language and block.reason is None]


def test_links_fragments_and_numbers_are_right() -> None:
    assert docs.complaints() == []


def test_generated_pages_are_up_to_date() -> None:
    """Seen in LMCache#1437."""
    stale = [
        path for path, (_, text) in docs.PAGES.items() if (docs.ROOT / path).read_text() != text()
    ]
    assert stale == [], "run `make catalogue`"


def test_there_is_an_example_of_a_configuration() -> None:
    assert any(block.where.startswith("README.md") for block in of("yaml"))


@pytest.mark.parametrize("block", of("yaml"), ids=lambda block: block.where)
def test_a_configuration_is_read_by_the_real_loader(block: Block, tmp_path: Path) -> None:
    """Seen in vllm#22532, LMCache#1735."""
    file = tmp_path / "lmcache.yaml"
    file.write_text(block.code)
    referred = dict.fromkeys(re.findall(r"\$\{(\w+)", block.code), "example")
    assert load(file, env=referred).config.tiers


@pytest.mark.slow
@pytest.mark.parametrize("block", of("python"), ids=lambda block: block.where)
def test_python_on_a_page_runs(block: Block, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", block.code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_the_way_from_an_empty_folder_to_green_laws(root: Path, tmp_path: Path) -> None:
    """The commands of docs/howto/write-a-backend.md, in order, in an empty folder.

    Installing goes into a folder of its own, so that the environment stays as it is.
    """
    page = (root / "docs/howto/write-a-backend.md").read_text()
    commands = "".join(match["code"] for match in BLOCK.finditer(page) if match["language"] == "sh")
    assert "lmcache plugins new" in commands
    assert "lmcache plugins verify" in commands
    site = tmp_path / "site"
    home = tmp_path / "work"
    home.mkdir()
    script = commands.replace("pip install", f"python -m pip install -q --target {site}")
    # a folder given by --target takes a built copy, not an editable one
    script = script.replace(" -e ./", " ./")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(site),
    }
    environment.pop("LMCACHE_PLUGINS", None)
    bash = shutil.which("bash")
    assert bash is not None
    result = subprocess.run(
        [bash, "-euxc", script],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert "shelf" in result.stdout
    assert (home / "conformance.json").exists()
