"""The outside distribution and the scaffold: small, of one shape, and both pass the kit."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_core.cli.scaffold import scaffold

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_backend"
BUDGET = 150


def files(folder: Path, package: str) -> set[str]:
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {
        str(path).replace(package, "PACKAGE")
        for path in found
        if "__pycache__" not in path.parts and not str(path).startswith(".")
    }


def code_lines(path: Path) -> int:
    """Lines that are neither blank nor part of a docstring."""
    source, docstrings = path.read_text(), set[int]()
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                if ast.get_docstring(node) is not None and first.end_lineno:
                    docstrings |= {*range(first.lineno, first.end_lineno + 1)}
    lines = source.splitlines()
    return sum(bool(text.strip()) for i, text in enumerate(lines, 1) if i not in docstrings)


def run_kit(folder: Path, where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "pytest", "-q", "-W", "error", "-c", os.devnull)
    here = ("--rootdir", str(where), "--import-mode=importlib", "-p", "no:cacheprovider")
    return subprocess.run(
        [*command, *here, *arguments, str(folder / "tests")],
        env={**os.environ, "PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=where,
    )


def test_example_stays_within_its_line_budget() -> None:
    counted = {
        str(path.relative_to(EXAMPLE)): code_lines(path)
        for path in EXAMPLE.rglob("*")
        if path.suffix in (".py", ".toml")
    }
    assert sum(counted.values()) <= BUDGET, counted


@pytest.mark.slow
def test_example_passes_the_kit(tmp_path: Path) -> None:
    done = run_kit(EXAMPLE, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_scaffold_has_the_shape_of_the_example_and_passes_the_kit(tmp_path: Path) -> None:
    folder = scaffold("backend", "tape-robot", tmp_path)
    assert files(folder, "lmcache_backend_tape_robot") == files(EXAMPLE, "lmcache_sqlite_example")
    text = "".join(path.read_text() for path in folder.rglob("*.*"))
    assert not re.search("@(name|package|dist|Class)@", text)
    done = run_kit(folder, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
