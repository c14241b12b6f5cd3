"""The daemon is killed under load: no request fails, no answer changes, the same engine goes on."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from engine import TWO_PROCESSES, Engine, daemon
from judging import differences, full, make_prompts

DEATHS = 20 if os.environ.get("LMCACHE_TEST_LONG") else 3
SHORT = 2
PROMPTS = make_prompts(24, seed=2)


def test_killed_and_restarted_daemons_fail_no_request_and_change_no_answer(
    model: Callable[[str], Path], folder: Path
) -> None:
    """With vLLM's default policy, under which one reported load failure ends a request."""
    llama = model("llama")
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 1024}
    with Engine(llama, folder / "plain.log", options=options) as engine:
        plain = engine.generate(PROMPTS)
    draw = random.Random(3)
    with (
        daemon(folder / "daemon", "--chunk-size", "128") as running,
        Engine(
            llama, folder / "cached.log", running.connector, running.env, options | TWO_PROCESSES
        ) as engine,
    ):
        assert running.connector.get("kv_load_failure_policy") is None
        engine.generate(PROMPTS)
        begun = time.monotonic()
        engine.generate(PROMPTS, tokens=SHORT, one_by_one=True)
        lap = time.monotonic() - begun
        for death in range(DEATHS):
            moment = draw.uniform(0.05, 0.95) * lap
            killer = threading.Timer(moment, running.kill)
            killer.start()
            # Short answers, one after the other: much of the time something is being loaded.
            answers = engine.generate(PROMPTS, tokens=SHORT, one_by_one=True)
            killer.join()
            print(f"death {death}: after {moment:.2f} of {lap:.2f} s")  # noqa: T201
            short = [replace(each, tokens=each.tokens[:SHORT]) for each in plain]
            differences(answers, short)
            running.start()
        differences(engine.generate(PROMPTS), plain)
        served = again(engine)
        assert served == [full(len(prompt)) for prompt in PROMPTS]
        assert engine.process.is_alive()


def again(engine: Engine) -> list[int]:
    """Tokens served once the engine has found the new daemon; it looks for it by itself."""
    wanted = [full(len(prompt)) for prompt in PROMPTS]
    end = time.monotonic() + 60
    while True:
        served = [answer.cached for answer in engine.generate(PROMPTS, tokens=1, one_by_one=True)]
        if served == wanted or time.monotonic() > end:
            return served
        time.sleep(0.5)
