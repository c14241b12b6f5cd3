"""The house stays small: line budgets, and no file that nobody reads to its end."""

import ast
import io
import tokenize
from pathlib import Path

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
CEILINGS = {
    "modules": 1251,
    "cli": 1008,
    "config": 1044,
    "engine": 835,
    "identity": 540,
    "memory": 1583,
    "policies": 648,
    "spi": 1165,
    "storage": 2921,
    "testing": 3958,
    "wire": 1904,
    "wrappers": 1534,
}
"""Code lines per part of the core (docs/design/0006): only ever lowered, or raised with a reason there."""
GENERATED = ("_catalogue.py",)
LONGEST = 400


def lines(files: list[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def code_lines(file: Path) -> int:
    """Lines that hold code: blank lines, comments and docstrings left out."""
    text = file.read_text()
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for part in node.body:
                if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant):
                    prose.update(range(part.lineno, (part.end_lineno or part.lineno) + 1))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - prose)


def sources(root: Path) -> list[Path]:
    """Python files of the tree: not the environment, not what is built."""
    skipped = ("build", "dist")
    return sorted(
        file
        for file in root.rglob("*.py")
        if not any(
            part in skipped or (part.startswith(".") and part != ".ci")
            for part in file.relative_to(root).parts
        )
    )


def part_of(file: Path) -> str:
    """A package of the core, or ``modules`` for the files beside the packages."""
    return file.parts[1] if len(file.parts) > 2 else "modules"


def test_every_part_of_the_core_stays_under_its_ceiling(root: Path) -> None:
    sizes: dict[str, int] = {}
    for file in sorted((root / "lmcache_core").rglob("*.py")):
        if file.name not in GENERATED:
            part = part_of(file.relative_to(root))
            sizes[part] = sizes.get(part, 0) + code_lines(file)
    assert sizes.keys() == CEILINGS.keys()
    assert {part: size for part, size in sizes.items() if size > CEILINGS[part]} == {}


def test_no_file_is_longer_than_400_lines(root: Path) -> None:
    files = [file for file in sources(root) if file.name not in GENERATED]
    long = {
        file.relative_to(root).as_posix(): count
        for file in files
        if (count := lines([file])) > LONGEST
    }
    assert long == {}


def test_no_file_is_called_utils(root: Path) -> None:
    named_by_engines = {"lmcache/utils.py", "lmcache/integration/vllm/utils.py"}
    found = {file.relative_to(root).as_posix() for file in sources(root) if "util" in file.stem}
    assert found <= named_by_engines
