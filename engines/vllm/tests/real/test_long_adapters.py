"""Adapters of one model side by side: each is served what it has computed itself, and nothing else; for nights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine import Answer, Engine, daemon
from judging import Expectation, differences, every_block, make_prompts
from models import adapter

PROMPTS = make_prompts(9, seed=11, longest=800)[3:]
OPTIONS = {"enable_prefix_caching": False, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def test_hits_never_cross_adapters(model: Callable[[str], Path], folder: Path) -> None:
    """The same prompts to the model, to two of its adapters, and to a third that has come under the first's name."""
    llama = model("llama")
    kinds = [None, *(adapter(folder / name, seed, llama) for seed, name in enumerate("ab"))]

    with Engine(llama, folder / "plain.log", options=OPTIONS) as engine:
        plain = [engine.generate(PROMPTS, one_by_one=True, adapter=kind) for kind in kinds]
    assert len({tuple(tokens(answers)) for answers in plain}) == len(kinds)
    expectation = Expectation()
    own = [expectation.ask(prompt) for prompt in PROMPTS]  # what prompts of one adapter share
    with daemon(folder / "adapters", "--chunk-size", "128") as running:
        first = (llama, folder / "first.log", running.connector, running.env, OPTIONS)
        with Engine(*first) as engine:
            for kind, baseline in zip(kinds, plain, strict=True):
                answers = engine.generate(PROMPTS, one_by_one=True, adapter=kind)
                differences(answers, baseline)
                served = [answer.cached for answer in answers]
                assert served == own or (engine.missed and sum(served) < sum(own))
            alone = engine.call("external")
            for kind, baseline in zip(kinds, plain, strict=True):
                every_block(engine, PROMPTS, baseline, one_by_one=True, adapter=kind)
            assert engine.call("external") > alone
        changed = adapter(folder / "a", 7, llama)  # other weights in the same place
        with Engine(llama, folder / "changed-plain.log", options=OPTIONS) as engine:
            baseline = engine.generate(PROMPTS, one_by_one=True, adapter=changed)
        assert tokens(baseline) != tokens(plain[1])
        with Engine(llama, folder / "second.log", *first[2:]) as engine:
            new = engine.generate(PROMPTS, one_by_one=True, adapter=changed)
            differences(new, baseline)
            served = [answer.cached for answer in new]
            assert served == own or (engine.missed and sum(served) < sum(own))
            every_block(engine, PROMPTS, baseline, one_by_one=True, adapter=changed)
            every_block(engine, PROMPTS, plain[2], one_by_one=True, adapter=kinds[2])


def tokens(answers: list[Answer]) -> list[int]:
    return [token for answer in answers for token in answer.tokens]
