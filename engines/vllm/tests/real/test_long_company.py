"""Beside other connectors, and with tokens that are guessed first: for nights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine import Answer, Engine, daemon
from judging import differences, full, make_prompts

PROMPTS = make_prompts(12, seed=9, longest=800)[3:]
PLAIN = {"enable_prefix_caching": False}


@pytest.fixture(scope="module")
def plain(model: Callable[[str], Path], folder: Path) -> list[Answer]:
    with Engine(model("llama"), folder / "plain.log", options=PLAIN) as engine:
        return engine.generate(PROMPTS, one_by_one=True)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", ["NixlConnector", "LMCacheMPConnector"])
def test_members_of_a_multi_connector_answer_the_same(
    name: str, first: bool, model: Callable[[str], Path], folder: Path, plain: list[Answer]
) -> None:
    """Of two that have everything the second is told that nothing of its offer is taken.

    vLLM's own OffloadingConnector does not run on a CPU.
    """
    place = folder / f"{name}-{first}"
    with (
        daemon(place, "--chunk-size", "16") as one,
        daemon(place / "b", "--chunk-size", "16") as two,
    ):
        nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        members = [one.connector, nixl if name == "NixlConnector" else two.connector]
        connector: dict[str, Any] = {
            "kv_connector": "MultiConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": members if first else members[::-1]},
        }  # fmt: skip
        with Engine(model("llama"), place / "engine.log", connector, one.env) as engine:
            differences(engine.generate(PROMPTS, one_by_one=True), plain)
            assert engine.call("reset_prefix_cache")
            before = engine.call("external")
            answers = engine.generate(PROMPTS, one_by_one=True)
            differences(answers, plain)
            assert engine.call("external") > before
            assert [answer.cached for answer in answers] == [full(len(p)) for p in PROMPTS]


def test_guessed_tokens_are_kept_only_when_they_are_confirmed(
    model: Callable[[str], Path], folder: Path, plain: list[Answer]
) -> None:
    guesses = {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
    }  # fmt: skip
    answered = [[*p, *a.tokens] for p, a in zip(PROMPTS, plain, strict=True)]
    with daemon(folder / "guesses", "--chunk-size", "16") as running:
        extra = running.connector["kv_connector_extra_config"] | {"lmcache.save_decode_cache": True}
        connector = running.connector | {"kv_connector_extra_config": extra}
        options = PLAIN | {"speculative_config": guesses}
        log = folder / "guesses.log"
        with Engine(model("llama"), log, connector, running.env, options) as engine:
            for _ in range(2):
                answers = engine.generate(PROMPTS)
                differences(answers, plain)
            assert [answer.cached for answer in answers] == [full(len(p)) for p in PROMPTS]
            assert engine.call("metrics")["vllm:spec_decode_num_draft_tokens"] > 0
            after = engine.generate(answered, tokens=8, one_by_one=True)
            assert sum(a.cached for a in after) > sum(full(len(p)) for p in PROMPTS)
    with Engine(model("llama"), folder / "answered.log", options=PLAIN) as engine:
        differences(after, engine.generate(answered, tokens=8, one_by_one=True))
