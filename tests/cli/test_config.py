"""``lmcache config``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmcache_core.cli import main

TEXT = """
chunk_size: 64
lookup_timeout_ms: 10
tiers:
- memory: {size: 1GiB}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "kv.yaml"
    path.write_text(TEXT)
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(path))
    return path


def test_a_table_of_keys_values_and_sources(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--set", "save_partial=true"]) == 0
    captured = capsys.readouterr()
    rows = {line.split("  ")[0]: line.split() for line in captured.out.splitlines()}
    assert next(iter(rows)) == "key"
    assert rows["chunk_size"] == ["chunk_size", "64", f"{file}:2"]
    assert rows["save_partial"] == ["save_partial", "true", "flag", "save_partial"]
    assert rows["tiers.memory.size"] == ["tiers.memory.size", "1GiB", f"{file}:5"]
    assert rows["layerwise"] == ["layerwise", "false", "default"]
    assert rows["plugins.allow"] == ["plugins.allow", "-", "default"]
    assert captured.err == (
        f"{file}:3: lookup_timeout_ms has no effect: a lookup is bounded by manager.lookup_budget"
        " and each tier's deadline\n"
    )


def test_the_same_as_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert {"key": "chunk_size", "value": 64, "source": f"{file}:2"} in document["settings"]
    assert len(document["notes"]) == 1
    assert captured.err == ""


def test_another_file(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("tiers: []")
    assert main(["config", "--config", str(other), "--json"]) == 0
    keys = [setting["key"] for setting in json.loads(capsys.readouterr().out)["settings"]]
    assert not [key for key in keys if key.startswith("tiers.")]


def test_a_plugin_that_is_missing_is_named_with_its_place(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("tiers: [memery]")
    assert main(["config"]) == 2
    assert capsys.readouterr().err == (
        f"lmcache: {file}:1: tiers.memery: no backend 'memery'; did you mean 'memory'?\n"
    )
