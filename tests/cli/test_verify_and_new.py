"""``lmcache plugins verify`` and ``lmcache plugins new``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.cli import main
from lmcache_core.cli.scaffold import scaffold
from lmcache_core.spi import ConfigError


def test_verifying_writes_a_report_and_prints_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "verify", "memory", "--only", "B1", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads((tmp_path / "conformance.json").read_text())
    assert "0 failed" in captured.err


def test_the_tier_of_a_file_can_be_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kv.yaml").write_text("tiers: [{memory: {size: 16MiB}}]")
    command = ["plugins", "verify", "memory", "--config", "kv.yaml", "--only", "B1"]
    assert main(command) == 0
    (tmp_path / "kv.yaml").write_text("tiers: []")
    assert main(command) == 2
    assert "no tier of plugin 'memory'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["memry"], "no backend 'memry'; did you mean 'memory'?"),
        (["memory", "--only", "B99"], "no law or test 'B99'"),
    ],
)
def test_a_wrong_name_is_a_usage_error(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "verify", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_the_kits_own_needs_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'hypothesis'", name="hypothesis")

    monkeypatch.setattr("lmcache_core.cli.plugins.importlib.import_module", missing)
    from lmcache_core.cli.plugins import verify
    from lmcache_core.spi import PluginUnavailable

    with pytest.raises(PluginUnavailable) as caught:
        verify("memory")
    assert str(caught.value) == (
        "the kit needs hypothesis: pip install -c constraints.txt -e '.[testing]'"
    )


def test_a_started_plugin_is_complete_and_passes_its_own_laws(tmp_path: Path) -> None:
    folder = scaffold("backend", "deep-shelf", tmp_path)
    assert folder == tmp_path / "lmcache-backend-deep-shelf"
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {
        "pyproject.toml",
        "README.md",
        "src/lmcache_backend_deep_shelf/__init__.py",
        "src/lmcache_backend_deep_shelf/backend.py",
        "src/lmcache_backend_deep_shelf/py.typed",
        "tests/test_conformance.py",
    } <= files
    for path in files:
        assert "@" not in path
        text = (folder / path).read_text()
        assert not [word for word in ("@name@", "@package@", "@dist@", "@Class@") if word in text]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / "tests")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(folder / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("backend", "Shelf", "not a plugin name: 'Shelf' (lower case, digits, single hyphens)"),
        ("backend", "a--b", "not a plugin name: 'a--b' (lower case, digits, single hyphens)"),
        ("backend", "../x", "not a plugin name: '../x' (lower case, digits, single hyphens)"),
        ("bakend", "shelf", "no template for 'bakend'; there are: backend"),
    ],
)
def test_what_cannot_be_started_is_said(tmp_path: Path, kind: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scaffold(kind, name, tmp_path)
    assert str(caught.value) == message
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "lmcache-backend-shelf").mkdir()
    with pytest.raises(ConfigError, match=r"lmcache-backend-shelf is there already$"):
        scaffold("backend", "shelf", tmp_path)


def test_the_command_prints_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "new", "backend", "shelf", "--into", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path}/lmcache-backend-shelf\n"
    assert "lmcache plugins verify shelf" in captured.err
