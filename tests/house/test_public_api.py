"""The plugin contract is what it was; what may still move says so."""

import ast
import sys
from importlib import import_module
from pathlib import Path

import lmcache_core.spi
from tests.house.snapshot import FROZEN, PROVISIONAL, snapshot

HERE = Path(__file__).parent


def test_the_frozen_parts_are_as_in_the_snapshot() -> None:
    assert snapshot() == (HERE / "spi_frozen.txt").read_text(), (
        "the contract changed; if that is meant: python tests/house/snapshot.py > tests/house/spi_frozen.txt"
    )


def test_backend_serde_and_policy_are_frozen() -> None:
    assert {"backend", "serde", "policy"} <= set(FROZEN)


def test_what_may_still_move_says_so() -> None:
    for name in PROVISIONAL:
        module = import_module(f"lmcache_core.spi.{name}")
        assert module.__doc__ is not None
        assert "Provisional" in module.__doc__


def test_every_exported_name_is_there_and_documented() -> None:
    exported = [value for value in vars(lmcache_core.spi).values() if isinstance(value, type)]
    assert len(exported) > 70
    for value in exported:
        assert value.__doc__, f"{value.__name__} has no docstring"


def test_the_contract_imports_only_the_standard_library_and_itself() -> None:
    for file in (Path(lmcache_core.spi.__file__).parent).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            imported = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in imported:
                top = name.split(".")[0]
                assert top in sys.stdlib_module_names or name.startswith("lmcache_core.spi"), name
