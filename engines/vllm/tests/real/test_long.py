"""What takes too long for every change: many prompts, a real model, two ranks, every combination of options."""

from __future__ import annotations

import itertools
import os
import pydoc_data.topics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine import TWO_PROCESSES, Answer, Daemon, Engine, daemon
from judging import differences, every_block, make_prompts

ROOT = Path(__file__).resolve().parents[4]
SMALL = {"num_gpu_blocks_override": 14, "max_num_batched_tokens": 256, "max_model_len": 1024}
PLAIN = {"enable_prefix_caching": False}
MANY = make_prompts(200, seed=7)
FEW = make_prompts(8, seed=8)


def test_two_hundred_prompts_in_little_memory(model: Callable[[str], Path], folder: Path) -> None:
    llama = model("llama")
    with Engine(llama, folder / "plain.log", options=PLAIN) as engine:
        plain = engine.generate(MANY)
    with (
        daemon(folder / "many", "--chunk-size", "128", gib=1) as running,
        Engine(llama, folder / "many.log", running.connector, running.env, SMALL | TWO_PROCESSES) as engine,
    ):  # fmt: skip
        differences(engine.generate(MANY), plain)
        assert engine.call("reset_prefix_cache")
        every_block(engine, MANY, plain)
        assert engine.call("metrics")["vllm:num_preemptions"] > 0


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The model of `make demo`, made by its code where it is not there."""
    home = Path(os.environ.get("LMCACHE_DEMO_HOME", ROOT / ".lmcache-work/demo"))
    ready = home / "smollm2-135m-instruct"
    if not ready.exists():
        code = "from lmcache_engine_transformers.demo.model import home, prepare; prepare(home())"
        subprocess.run([ROOT / ".venv/bin/python", "-c", code], check=True, cwd=ROOT)
    return ready


def test_twenty_prompts_about_texts_on_a_real_model(smollm2: Path, folder: Path) -> None:
    """Questions about one page of Python's reference share its tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2, local_files_only=True)
    pages = sorted(pydoc_data.topics.topics.items(), key=lambda page: len(page[1]))[-5:]
    prompts = [
        tokenizer.encode(f"{text[:3000]}\n\nQuestion {number}: what is {name}?\nAnswer:")
        for name, text in pages
        for number in range(4)
    ]
    with Engine(smollm2, folder / "smol-plain.log", options=PLAIN) as engine:
        plain = engine.generate(prompts, one_by_one=True)
    with (
        daemon(folder / "smol", "--chunk-size", "128", gib=2) as running,
        Engine(smollm2, folder / "smol.log", running.connector, running.env, PLAIN) as engine,
    ):
        differences(engine.generate(prompts, one_by_one=True), plain)
        every_block(engine, prompts, plain, one_by_one=True)


def test_two_ranks_keep_and_find_their_halves(model: Callable[[str], Path], folder: Path) -> None:
    options = {"tensor_parallel_size": 2, "enable_prefix_caching": False}
    two = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with Engine(model("llama"), folder / "tp-plain.log", env=two, options=options) as engine:
        plain = engine.generate(FEW, one_by_one=True)
    with (
        daemon(folder / "tp", "--chunk-size", "128", "--arena-mode", "shared-rw") as running,
        Engine(model("llama"), folder / "tp.log", running.connector, running.env | two, options) as engine,
    ):  # fmt: skip
        differences(engine.generate(FEW, one_by_one=True), plain)
        every_block(engine, FEW, plain, one_by_one=True)


CHOICES = list(
    itertools.product(
        ("LMCacheMPConnector", "LMCacheConnectorV1"), (True, False), (256, 4096), ("16", "256")
    )
)


@pytest.fixture(scope="module")
def few(model: Callable[[str], Path], folder: Path) -> list[Answer]:
    with Engine(model("llama"), folder / "few.log", options=PLAIN) as engine:
        return engine.generate(FEW)


@pytest.fixture(scope="module")
def running(folder: Path) -> Any:
    with daemon(folder / "matrix") as each:
        yield each


def named(name: str, running: Daemon, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Connector and environment under one of vLLM's own names: a shared daemon or a private one."""
    if name == "LMCacheMPConnector":
        return running.connector, running.env
    env = {"LMCACHE_RUNTIME_DIR": str(folder / "private"), "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.3"}
    return {"kv_connector": name, "kv_role": "kv_both"}, env


@pytest.mark.parametrize(("name", "prefixes", "batch", "chunk"), CHOICES)
def test_any_combination_of_options_answers_the_same(
    name: str, prefixes: bool, batch: int, chunk: str,
    model: Callable[[str], Path], folder: Path, few: list[Answer], running: Daemon,
) -> None:  # fmt: skip
    connector, env = named(name, running, folder)
    env = env | {"LMCACHE_CHUNK_SIZE": chunk}
    options = {"enable_prefix_caching": prefixes, "max_num_batched_tokens": batch}
    log = folder / f"{name}-{prefixes}-{batch}-{chunk}.log"
    with Engine(model("llama"), log, connector, env, options) as engine:
        differences(engine.generate(FEW), few)
        assert not prefixes or engine.call("reset_prefix_cache")
        differences(engine.generate(FEW), few)
        assert engine.call("external") > 0


@pytest.mark.parametrize("name", ["LMCacheMPConnector", "LMCacheConnectorV1"])
def test_requests_wait_for_their_loads_under_either_name(
    name: str, model: Callable[[str], Path], folder: Path, few: list[Answer], running: Daemon
) -> None:
    connector, env = named(name, running, folder)
    extra = connector.get("kv_connector_extra_config", {}) | {"lmcache.async_load": True}
    connector = connector | {"kv_connector_extra_config": extra}
    env = env | {"LMCACHE_CHUNK_SIZE": "128"}
    log = folder / f"{name}-waits.log"
    with Engine(model("llama"), log, connector, env, PLAIN | TWO_PROCESSES) as engine:
        differences(engine.generate(FEW), few)
        before = engine.call("external")
        answers = every_block(engine, FEW, few)
        assert engine.call("external") - before >= sum(answer.cached for answer in answers)
