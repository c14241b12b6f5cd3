"""Whether an engine may work with what its tiers lose on its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmcache_core.config import EngineConfig, Quality
from lmcache_core.engine import Cache
from lmcache_core.engine.quality import Report, complaints, model_id, read, record
from lmcache_core.spi import ConfigError

pytest.importorskip("lmcache_serde_quant")
pytest.importorskip("lmcache_backend_disk")

FIDELITY = "approx:quant(group=32,mode=int8)+quant(mode=kivi4)"


def report(serde: str, kl: float, model: str = "m", date: str = "2026-11-30") -> Report:
    return Report(model=model, serde=serde, kl=kl, top1=0.99, date=date)


def test_every_level_of_a_ladder_has_to_be_known_and_good(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    options = EngineConfig(quality_report=str(path), quality_kl=0.01)
    assert complaints(options, "exact", "m") == []
    assert len(complaints(options, FIDELITY, "m")) == 2
    record(path, [report("quant(group=32,mode=int8)", 0.001), report("quant(mode=kivi4)", 0.001)])
    assert complaints(options, FIDELITY, "m") == []
    assert len(complaints(options, FIDELITY, "another")) == 2
    record(path, [report("quant(mode=kivi4)", 0.0123)])  # measured again
    (line,) = complaints(options, FIDELITY, "m")
    assert line == (
        "quant(mode=kivi4) costs 0.0123 nats per token on this model (2026-11-30), "
        "over quality_kl: 0.01; choose a finer serde"
    )
    record(path, [report("quant(mode=kivi4)", float("nan"))])
    assert len(complaints(options, FIDELITY, "m")) == 1


def test_a_report_keeps_one_record_for_each_model_and_serde(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    record(path, [report("a", 1.0), report("a", 2.0, "n")])
    record(path, [report("a", 3.0)])
    assert [(each.model, each.kl) for each in read(path)] == [("m", 3.0), ("n", 2.0)]
    assert set(json.loads(path.read_text())[0]) == {"model", "serde", "kl", "top1", "date"}
    path.write_text("[{}]")
    with pytest.raises(ConfigError, match="is no quality report"):
        read(path)


def test_a_model_is_named_by_its_weights(tmp_path: Path) -> None:
    assert model_id("org/name") == "org/name"
    (tmp_path / "model.bin").write_bytes(b"weights")
    found = model_id(tmp_path)
    assert len(found) == 64
    (tmp_path / "model.bin").write_bytes(b"Weights")
    assert model_id(tmp_path) != found


@pytest.mark.parametrize("quality", list(Quality))
def test_an_engine_refuses_warns_or_does_not_care(
    tmp_path: Path, quality: Quality, caplog: pytest.LogCaptureFixture
) -> None:
    disk = {
        "path": str(tmp_path / "kv"),
        "size": "16MiB",
        "ladder": [[], [{"quant": {"mode": "int8"}}]],
    }
    settings = {"tiers": [{"cpu": {"size": "16MiB"}}, {"disk": disk}], "quality": quality.value}
    with Cache.from_config(settings) as cache:
        assert cache.fidelity == "approx:quant(mode=int8)"
        if quality is Quality.REFUSE:
            with pytest.raises(
                ConfigError, match=r"what quant\(mode=int8\) costs on this model is unk"
            ):
                cache.admit("m")
        else:
            cache.admit("m")
    assert ("quant(mode=int8) costs" in caplog.text) == (quality is Quality.WARN)
