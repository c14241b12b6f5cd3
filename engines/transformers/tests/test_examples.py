"""The examples run, and something is found."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["multi_turn", "rag", "agent", "batch_template"])
def test_an_example_runs_and_finds_what_it_should(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert not ended.value.code
    rates = re.findall(r"hit rate: (\d+)%", capsys.readouterr().out)
    assert rates
    assert max(map(int, rates)) >= 30
    if name == "rag":
        assert int(rates[1]) > int(rates[0])
