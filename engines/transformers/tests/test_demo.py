"""The demo's own sums, and the whole of it on a tiny model."""

import os
from pathlib import Path

import pytest
import torch
from lmcache_engine_transformers.demo.command import (
    _print,
    expected_reused,
    measure,
    tokens_of,
)
from lmcache_engine_transformers.demo.model import load
from lmcache_engine_transformers.demo.settings import calibrated, run_module, settings_for
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from engines.transformers.tests.tiny import make_model
from lmcache_core.spi import ConfigError, Unsupported
from lmcache_core.testing.services import need_service

TEXT = " ".join(f"w{number % 90}" for number in range(150))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model on disk as anybody's is: weights, configuration, tokenizer."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # other processes, as tiny.py says for this one
    words = {f"w{number}": number + 3 for number in range(94)} | {"<unk>": 0}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    made = tmp_path / "model"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(made)
    make_model().save_pretrained(made)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tier", "serde"),
    [
        ("float32", "disk", ""),
        ("bf16", "redis", "x12, {zstd: {level: 1}}"),  # an exact encoding changes no answer
        ("float32", "s3", ""),
        ("float32", "mooncake", ""),
    ],
)
def test_the_whole_demo_finds_every_full_chunk(
    folder: Path, tmp_path: Path, dtype: str, tier: str, serde: str
) -> None:
    if serde:
        pytest.importorskip("lmcache_serde_lossless")
    try:
        settings = settings_for(tier, serde, 16, tmp_path)
    except Unsupported as error:
        need_service(tier, str(error), start=f"lmcache demo --tier {tier}")
    report = measure(
        folder,
        dtype=dtype,
        settings=settings,
        text=TEXT,
        questions=["w1 w2", "w3 w4 w5 w6 w7 w8 w9 w10 w11 w12 w13 w14 w15 w16"],
    )
    assert report.findings == []
    assert [row.reused for row in report.rows] == [row.prompt // 16 * 16 for row in report.rows]
    if dtype == "float32":
        assert all(row.equal for row in report.rows)
    assert report.daemons == (tier != "disk")
    served = sum(row.reused for row in report.rows)
    assert report.served["lower"] == report.served["warm"] == (served, served)
    assert {name: sum(found.values()) for name, found in report.hits.items()} == {
        "stored": report.served["stored"][0] // 16, "lower": served // 16, "warm": served // 16,
    }  # fmt: skip
    assert report.hits["lower"][tier] == report.tokens // 16 > 0
    assert report.hits["warm"][tier] == 0
    assert (report.denser != 1.0) == bool(serde)
    assert report.own_share > 0 < report.own["empty"]
    _print(report)


def test_tables_that_are_there_are_not_made_again(tmp_path: Path) -> None:
    pytest.importorskip("lmcache_serde_cachegen")
    (tmp_path / "model.tables").write_bytes(b"tables")
    settings = settings_for("disk", "klt, zstd", 16, tmp_path)
    found = calibrated(settings, Path("model"), tmp_path, print)
    tables = {"klt": {"tables": str(tmp_path / "model.tables")}}
    assert found["tiers"][1]["disk"]["serde"] == [tables, "zstd"]


def test_missing_tables_are_made_from_little_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lmcache_serde_cachegen")
    asked: list[list[str]] = []

    def run(module: list[str], **options: object) -> str:
        asked.append(module)
        return ""

    monkeypatch.setattr("lmcache_engine_transformers.demo.settings.run_module", run)
    heard: list[str] = []
    found = calibrated(settings_for("disk", "klt", 16, tmp_path), Path("m"), tmp_path, heard.append)
    assert heard == ["calibrating, once"]
    assert asked[0][:5] == ["lmcache_core", "calibrate", "m", "--out", str(tmp_path / "m.tables")]
    assert asked[0][asked[0].index("--texts") + 1] == "3"
    assert found["tiers"][1]["disk"]["serde"] == [{"klt": {"tables": str(tmp_path / "m.tables")}}]


def test_what_a_module_says_is_told_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    (tmp_path / "says.py").write_text(
        "import os, sys, time\n"
        "print('half', file=sys.stderr)\n"
        f"while not os.path.exists({str(told)!r}): time.sleep(0.01)\n"
        "print(sys.stdin.read())\n"
        "sys.exit('no more' if sys.argv[1:] else 0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    heard: list[str] = []

    def say(line: str) -> None:
        heard.append(line)
        told.touch()

    assert run_module(["says"], "given", say) == "given\n"
    assert heard == ["half"]
    with pytest.raises(RuntimeError, match="no more"):
        run_module(["says", "fail"])


def test_a_module_ends_with_who_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stays.py").write_text(
        "import os, sys, time\nprint(os.getpid(), file=sys.stderr, flush=True)\ntime.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def interrupted(line: str) -> None:
        raise KeyboardInterrupt(line)

    with pytest.raises(KeyboardInterrupt) as raised:
        run_module(["stays"], say=interrupted)
    with pytest.raises(ProcessLookupError):
        os.kill(int(str(raised.value)), 0)


def test_what_must_be_found_is_counted_without_the_cache() -> None:
    known: set[tuple[int, ...]] = set()
    first, second = list(range(10)), [*range(8), 99, 98]
    assert expected_reused(known, [first, first, second, second], 4) == [0, 8, 8, 8]
    assert expected_reused(known, [first[:8]], 4) == [7]
    assert expected_reused(known, [[5, *first]], 4) == [0]


def test_a_folder_without_a_model_and_an_unknown_dtype_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder with a model"):
        load(tmp_path, "float32")
    with pytest.raises(ConfigError, match="no dtype 'float99'"):
        load(tmp_path, "float99")
    with pytest.raises(ConfigError, match="--tier takes"):
        settings_for("[a, b]", "", 16, tmp_path)


def test_a_prompt_begins_with_the_document(folder: Path) -> None:
    tokenizer, model = load(folder, "fp16")
    assert model.dtype is torch.float16
    one, two = (tokens_of(tokenizer, TEXT, question) for question in ("w1", "w2"))
    assert one[:150] == two[:150]
    assert one != two
