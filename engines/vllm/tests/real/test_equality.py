"""The same tokens as without a cache, and as many served as there are: chunked, shared, preempted, restarted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine import TWO_PROCESSES, Answer, Daemon, Engine, daemon
from judging import Expectation, differences, every_block, full, make_prompts

TOKENS = 48
SMALL = {
    "num_gpu_blocks_override": 14, "max_num_batched_tokens": 256, "max_model_len": 1024, **TWO_PROCESSES,
}  # fmt: skip
PROMPTS = make_prompts(24)
OTHERS = make_prompts(4, seed=1)[2:]


@pytest.fixture(scope="module")
def llama(model: Callable[[str], Path]) -> Path:
    return model("llama")


@pytest.fixture(scope="module")
def plain(llama: Path, folder: Path) -> list[Answer]:
    """What the engine says without any cache, to all prompts."""
    with Engine(llama, folder / "plain.log", options={"enable_prefix_caching": False}) as engine:
        answers = engine.generate([*PROMPTS, *OTHERS], tokens=TOKENS)
    assert not any(answer.cached for answer in answers)
    return answers


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Daemon]:
    with daemon(folder / "daemon", "--chunk-size", "16") as each:
        yield each


def test_answers_follow_the_whole_prompt(plain: list[Answer]) -> None:
    """Else wrong keys and values would go unseen: prompts that end alike are answered differently."""
    beginnings = {tuple(answer.tokens[:4]) for answer in plain}
    assert len(beginnings) == len(plain)


def test_equal_answers_and_every_kept_token_served_while_requests_are_preempted(
    llama: Path, folder: Path, plain: list[Answer], running: Daemon
) -> None:
    """Seen in vllm#31210.

    Seen in LMCache#2336.
    """
    baseline = plain[: len(PROMPTS)]
    with Engine(llama, folder / "small.log", running.connector, running.env, SMALL) as engine:
        differences(engine.generate(PROMPTS, tokens=TOKENS), baseline)
        assert engine.call("reset_prefix_cache")
        before = engine.call("external")
        every_block(engine, PROMPTS, baseline, tokens=TOKENS)
        assert engine.call("external") > before
        assert engine.call("metrics")["vllm:num_preemptions"] > 0


def test_a_restarted_engine_is_served_every_full_chunk_by_the_daemon_that_stayed(
    llama: Path, folder: Path, plain: list[Answer], running: Daemon
) -> None:
    """One after the other with vLLM's own prefix caching off: each token comes from the daemon."""
    options = {"enable_prefix_caching": False}
    with Engine(llama, folder / "again.log", running.connector, running.env, options) as engine:
        baseline = plain[: len(PROMPTS)]
        answers = every_block(engine, PROMPTS, baseline, tokens=TOKENS, one_by_one=True)
        served = sum(answer.cached for answer in answers)
        assert engine.call("external") >= served
        assert engine.missed or engine.call("external") == served


def test_two_engines_share_what_either_has_computed(
    llama: Path, folder: Path, plain: list[Answer], running: Daemon
) -> None:
    socket = str(running.folder / f"run/port-{running.port}.sock")  # as pods of one node name it
    extra = {
        "lmcache.daemon.socket": socket,
        "use_layerwise": True,
    }  # kept and loaded layer by layer
    connector = running.connector | {"kv_connector_extra_config": extra}
    sharing = (connector, running.env)
    with (
        Engine(llama, folder / "first.log", *sharing) as first,
        Engine(llama, folder / "second.log", *sharing) as second,
    ):
        expectation = Expectation()
        computed = first.generate(OTHERS, tokens=TOKENS, one_by_one=True)
        assert [a.cached for a in computed] == [expectation.ask(prompt) for prompt in OTHERS]
        shared = second.generate(OTHERS, tokens=TOKENS, one_by_one=True)
        assert [a.cached for a in shared] == [full(len(prompt)) for prompt in OTHERS]
        assert second.call("external") > 0
    for answers in (computed, shared):
        differences(answers, plain[len(PROMPTS) :])
