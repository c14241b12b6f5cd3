"""The house stays small: line budgets, and no file that nobody reads to its end."""

from pathlib import Path

GENERATED = ("_catalogue.py",)
LONGEST = 400


def lines(files: list[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


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


def test_the_core_is_at_most_6000_lines(root: Path) -> None:
    core = [
        file
        for file in (root / "lmcache_core").rglob("*.py")
        if "testing" not in file.relative_to(root).parts and file.name not in GENERATED
    ]
    assert lines(core) <= 6000


def test_the_kit_is_at_most_2500_lines(root: Path) -> None:
    assert lines(list((root / "lmcache_core/testing").rglob("*.py"))) <= 2500


def test_no_file_is_longer_than_400_lines(root: Path) -> None:
    files = [file for file in sources(root) if file.name not in GENERATED]
    long = {
        file.relative_to(root).as_posix(): count
        for file in files
        if (count := lines([file])) > LONGEST
    }
    assert long == {}


def test_no_file_is_called_utils(root: Path) -> None:
    assert [file for file in sources(root) if "util" in file.stem] == []
