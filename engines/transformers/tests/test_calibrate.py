"""The command on a tiny model: tables that both codecs read, and a report with a match and a mismatch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmcache_engine_transformers.calibrate import command
from lmcache_engine_transformers.calibrate.samples import frequencies, library_text, sample, spread

from engines.transformers.tests.tiny import make_model, prompt
from lmcache_core.cli import main


class Tokenizer:
    """A token for each character."""

    def __call__(self, text: str) -> Any:
        return type("Ids", (), {"input_ids": [3 + ord(each) % 90 for each in text]})


@pytest.fixture
def model() -> Any:
    return make_model("qwen3", head_dim=16)


def test_slopes_tell_what_errors_cost(model: Any) -> None:
    kv, slopes = sample(model, prompt(60), 48, seed=1)
    assert kv.shape == slopes.shape == (3, 2, 48, 2, 16)
    assert kv.dtype == slopes.dtype == np.float32
    assert (np.abs(slopes).sum((2, 3, 4)) > 0).all()
    assert [each.size for each in frequencies(model)] == [8]


def test_parts_of_a_text_do_not_overlap() -> None:
    assert spread(range(10), 7, 3) == [range(3), range(4, 7), range(7, 10)]
    assert spread(range(2), 7, 3) == []
    assert len(library_text()) > 300_000


def test_every_level_is_reported_on_two_sources(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lmcache_engine_transformers.demo import model as models

    monkeypatch.setattr(models, "load", lambda path, dtype: (Tokenizer(), model))
    texts = [tmp_path / name for name in ("like", "other")]
    for seed, path in enumerate(texts):
        path.write_text("".join(chr(97 + each % 26) for each in prompt(600, seed=seed)))
    target = tmp_path / "tiny.tables"
    command_line = [
        "calibrate", "tiny", "--out", str(target), "--text", str(texts[0]), "--other", str(texts[1]),
        "--texts", "4", "--context", "64", "--following", "16", "--chunk", "32",
    ]  # fmt: skip
    assert main([*command_line, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "tiny.tables.json").read_text()) == report
    assert report["digest"] == target.read_bytes()[-32:].hex()
    rows = report["rows"]
    assert {(row["text"], row["serde"].split()[0]) for row in rows} == {
        (text, codec) for text in ("match", "mismatch") for codec in command.CODECS
    }
    declined = {row["serde"] for row in rows if row["declined"] and row["text"] == "match"}
    assert declined <= {"klt 5", "cachegen 5"}  # random weights have no structure to keep
    for codec in command.CODECS:
        bits = [
            row["bits"] for row in rows if (row["text"], row["serde"][:3]) == ("match", codec[:3])
        ]
        assert bits == sorted(bits, reverse=True)
        assert bits[-1] < 8
    command.show(rows)
    assert "mismatch" in capsys.readouterr().out


def test_a_model_it_cannot_do_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lmcache_engine_transformers.demo import model as models

    monkeypatch.setattr(models, "load", lambda path, dtype: (Tokenizer(), make_model()))
    (tmp_path / "text").write_text("a" * 300)
    options = ["--text", str(tmp_path / "text"), "--context", "32", "--following", "8"]
    assert main(["calibrate", "tiny", "--out", str(tmp_path / "it"), *options]) == 2
    assert "cannot be calibrated: heads of 8 elements" in capsys.readouterr().err
    assert not (tmp_path / "it").exists()
