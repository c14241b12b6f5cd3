"""The bench on a tiny model: exact is exact, lossy is measured, everything shows in one table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache_engine_transformers.bench.coding import code
from lmcache_engine_transformers.bench.command import (
    Row,
    chains_of,
    measured,
    note,
    row_of,
    show,
    slices,
)
from lmcache_engine_transformers.bench.quality import Subject

from engines.transformers.tests.tiny import make_model, prompt
from lmcache_core.cli import main
from lmcache_core.engine.quality import read
from lmcache_core.registry import Registry
from lmcache_core.spi import ConfigError, KVSpec, TensorSerde, ValueInfo

CHUNK = 16


@dataclass(frozen=True, slots=True)
class CutOptions:
    bits: int = 4


class Cut(TensorSerde):
    """Forgets the low bits of the mantissa."""

    config_type = CutOptions
    wire_id = "cut"
    lossless = False
    error_bound = "2**-3 of the value"

    def __init__(self, config: CutOptions, /) -> None:
        self.mask = 0xFF << config.bits & 0xFF

    def bound(self, spec: KVSpec, /) -> int:
        return spec.nbytes

    def encode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> int:
        into[: source.nbytes] = source
        into[: source.nbytes : 2] = bytes(byte & self.mask for byte in source[::2])
        return source.nbytes

    def decode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> None:
        into[:] = source


class Picky(Cut):
    """Declines."""

    def encode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> int:
        raise ValueError("not this one")


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(make_model(), prompt(70), 48)


def made(subject: Subject, *chain: Any) -> Row:
    return row_of("it", [measured(subject, chain, CHUNK)])


def test_what_a_lossy_serde_costs_is_measured_and_more_bits_cost_less(subject: Subject) -> None:
    rows = [made(subject, Cut(CutOptions(bits))) for bits in (6, 4)]
    for row in rows:
        assert not row.exact
        assert 0 < row.key_error < 0.5
        assert row.kl > 0
        assert 0 <= row.top1 <= 1
        assert min(row.encode_gb_s, row.decode_gb_s, row.copy_gb_s) > 0
    assert rows[0].kl > rows[1].kl
    assert rows[0].key_error > rows[1].key_error


def test_what_one_lossy_serde_costs_is_noted_for_the_engine(
    subject: Subject, tmp_path: Path
) -> None:
    pytest.importorskip("lmcache_serde_quant")
    row = replace(made(subject, Cut(CutOptions(4))), serde="[quant: {mode: int8}, zstd]")
    note(tmp_path / "it.json", Path("org/name"), Registry(), [row, replace(row, serde="zstd")])
    (found,) = read(tmp_path / "it.json")
    assert (found.model, found.serde, found.kl) == ("org/name", "quant(mode=int8)", row.kl)


def test_the_first_tokens_of_the_text_stay_exact(subject: Subject) -> None:
    found = code(subject.kv, [Cut(CutOptions(6))], CHUNK).kv
    same = (found.view(torch.int16) == subject.kv.view(torch.int16)).all(-1).all(-1).all(0).all(0)
    assert same[:4].all()
    assert not same[4:].any()


def test_a_chain_of_what_loses_nothing_is_exact(subject: Subject) -> None:
    pytest.importorskip("lmcache_serde_lossless")
    chains = dict(chains_of(Registry(), ["x12", "[xr, {zstd: {level: 3}}]"]))
    assert [len(chain) for chain in chains.values()] == [1, 2]
    for chain in chains.values():
        row = made(subject, *chain)
        assert (row.exact, row.kl, row.top1, row.declined) == (True, 0.0, 1.0, 0)
    assert row.bits < 16


def test_what_a_serde_declines_is_stored_raw_and_counted(subject: Subject) -> None:
    row = made(subject, Picky(CutOptions()))
    assert (row.exact, row.ratio, row.declined) == (True, 1.0, 3 * 3)


def test_every_installed_serde_is_found_and_those_that_need_options_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = [name for name, _ in chains_of(Registry(), None)]
    assert "encrypt" not in names
    if "left out: encrypt" not in capsys.readouterr().err:
        pytest.importorskip("lmcache_serde_encrypt")
        pytest.fail("nothing says why encrypt is left out")


@pytest.mark.parametrize(
    ("written", "reason"), [("x12: {speed: 9}", "x12"), ("{a: 1, b: 2}", "a name or one")]
)
def test_what_is_no_chain_is_refused(written: str, reason: str) -> None:
    pytest.importorskip("lmcache_serde_lossless")
    with pytest.raises(ConfigError, match=reason):
        chains_of(Registry(), [written])


def test_a_text_too_short_is_refused_and_slices_do_not_overlap() -> None:
    assert slices(range(100), 3, 40) == [range(40), range(40, 80)]
    assert [part[0] for part in slices(range(70_000), 3, 2048)] == [0, 30_000, 60_000]
    with pytest.raises(ConfigError, match="a text of 10 tokens is shorter than 40"):
        slices(range(10), 3, 40)


def test_the_table_and_the_pictures_show_every_row(
    subject: Subject, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [made(subject, Cut(CutOptions())), made(subject)]
    show(rows)
    shown = capsys.readouterr().out
    assert "top-1 %" in shown
    assert "exact" in shown
    pytest.importorskip("matplotlib")
    from lmcache_engine_transformers.bench.plot import plot

    names = {path.name for path in plot(rows, tmp_path / "new", "title")}
    assert names == {"rate.png", "rate.svg", "speed.png", "speed.svg"}
    assert all((tmp_path / "new" / name).stat().st_size > 1000 for name in names)


def test_the_bench_stands_among_the_benches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serde", "--help"]) == 0
    assert "MODEL" in capsys.readouterr().out
