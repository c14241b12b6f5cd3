"""vLLM engines and daemons for tests and benchmarks: each a process of its own, stopped by its pid.

An engine is forked from a server that has imported vLLM once, and starts in seconds where it needs no
other process; the tests of `vllm serve` pay the whole start. Every engine computes with the same thread, whatever its connector.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",  # two threads that spin on a busy machine wait for each other
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "LMCACHE_DAEMON__GRACE": "1",  # private daemons end with the test
}
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Scheduler and worker in the engine's process: it starts in two seconds instead of twenty."""
TWO_PROCESSES = {"distributed_executor_backend": "mp"}
"""Option of an engine whose worker is a process of its own, as in every server."""
PRELOAD = ["vllm", "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker",
           "vllm.v1.executor.multiproc_executor", "vllm.model_executor.models.llama"]  # fmt: skip
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 4096,
    "max_num_batched_tokens": 4096, "disable_log_stats": False, "seed": 0,
}  # fmt: skip
READY_S, ANSWER_S = 240.0, 240.0


class EngineDied(AssertionError):
    """The process is gone, or says nothing; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one prompt got: its tokens, how far the two best logits lay apart at each, and what was served.

    ``cached`` counts prompt tokens that were not computed, ours and vLLM's own.
    """

    tokens: list[int]
    gaps: list[float]
    cached: int
    reason: str
    params: dict[str, Any] | None = None


@dataclass
class Engine:
    """One engine; ``connector`` is what the user writes as ``--kv-transfer-config``."""

    model: Path
    log: Path
    connector: Mapping[str, Any] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        os.environ.update(ENVIRONMENT)  # the fork server and all its children have them
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._pipe, theirs = context.Pipe()
        settings = (
            str(self.model),
            self.connector,
            ONE_PROCESS | dict(self.env),
            OPTIONS | dict(self.options),
        )
        self.process = context.Process(target=_serve, args=(theirs, str(self.log), *settings))
        self.process.start()
        theirs.close()
        self.start_s = float(self._answer(READY_S))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self, prompts: Sequence[Sequence[int]], *, tokens: int = 32, one_by_one: bool = False,
        params: Mapping[str, Any] | None = None, adapter: Path | None = None,
    ) -> list[Answer]:  # fmt: skip
        """Greedy answers to all prompts, together or one after the other, of the model or of one of its adapters."""
        given = (
            [list(prompt) for prompt in prompts],
            tokens,
            one_by_one,
            dict(params or {}),
            adapter,
        )
        answers: list[Answer] = self.call("generate", *given)
        return answers

    @property
    def missed(self) -> bool:
        """Whether the daemon gave no answer in time, once at least: on a busy machine there are fewer hits then."""
        return "gives no answer in time" in self.log.read_text(errors="replace")

    def call(self, name: str, *arguments: Any) -> Any:
        """One of ``Commands``, in the engine's process."""
        self.send(name, *arguments)
        return self.receive()

    def send(self, name: str, *arguments: Any) -> None:
        self._pipe.send((name, arguments))

    def receive(self) -> Any:
        return self._answer(ANSWER_S)

    def close(self) -> None:
        """End it as a user does; by force what is left of its group."""
        with contextlib.suppress(OSError):
            self._pipe.send(("close", ()))
        self.process.join(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join(5)
        self._pipe.close()

    def _answer(self, patience_s: float) -> Any:
        try:
            if not self._pipe.poll(patience_s):
                raise EngineDied(f"no answer in {patience_s:.0f} s\n{tail(self.log)}")
            good, value = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise EngineDied(f"the engine's process ended\n{tail(self.log)}") from None
        if not good:
            raise EngineDied(f"{value}\n{tail(self.log)}")
        return value


def tail(log: Path, lines: int = 60) -> str:
    """The last lines of a log."""
    if not log.exists():
        return f"(no {log})"
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


class Commands:
    """What an engine's process does when it is asked."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.adapters: dict[Path, int] = {}

    def generate(
        self, prompts: list[list[int]], tokens: int, one_by_one: bool, more: dict[str, Any],
        adapter: Path | None = None,
    ) -> list[Answer]:  # fmt: skip
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        params = SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=2, detokenize=False, **more
        )
        lora = None
        if adapter is not None:
            number = self.adapters.setdefault(adapter, len(self.adapters) + 1)
            lora = LoRARequest(adapter.name, number, str(adapter))
        wanted = [{"prompt_token_ids": prompt} for prompt in prompts]
        parts = [[each] for each in wanted] if one_by_one else [wanted]
        return [
            _answer(output)
            for part in parts
            for output in self.llm.generate(part, params, use_tqdm=False, lora_request=lora)
        ]

    def timed(self, prompt: list[int]) -> tuple[float, Answer]:
        """Seconds until the first token, measured here so that no pipe is in it."""
        begun = time.perf_counter()
        (answer,) = self.generate([prompt], 1, False, {})
        return time.perf_counter() - begun, answer

    def reset_prefix_cache(self) -> bool:
        """Forget vLLM's own cached prefixes, and nothing else."""
        return bool(self.llm.reset_prefix_cache())

    def reset_all(self) -> bool:
        """As after new weights: vLLM's own prefixes and the connector's."""
        return bool(self.llm.reset_prefix_cache(reset_connector=True))

    def metrics(self) -> dict[str, float]:
        """vLLM's own counters by name; those of one name and different labels are added up."""
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                found[metric.name] = found.get(metric.name, 0.0) + value
        return found

    def external(self) -> int:
        """Prompt tokens that came through the connector so far."""
        return int(
            sum(
                metric.value
                for metric in self.llm.get_metrics()
                if metric.name == "vllm:prompt_tokens_by_source"
                and metric.labels.get("source") == "external_kv_transfer"
            )
        )

    def evaluate(self, code: str) -> Any:
        """An expression over ``llm``; for measurements."""
        return eval(code, {"llm": self.llm})  # noqa: S307 -- the caller is the test itself


def _answer(output: Any) -> Answer:
    made = output.outputs[0]
    gaps = []
    for step in made.logprobs:
        best = sorted((each.logprob for each in step.values()), reverse=True)
        gaps.append(best[0] - best[1])
    return Answer(
        list(made.token_ids), gaps, output.num_cached_tokens or 0, made.finish_reason or "",
        output.kv_transfer_params,
    )  # fmt: skip


def _serve(
    pipe: Connection, log: str, model: str, connector: Mapping[str, Any] | None,
    env: Mapping[str, str], options: dict[str, Any],
) -> None:  # fmt: skip
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(log, "ab", buffering=0) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.environ.update(env)
    try:
        begun = time.monotonic()
        from vllm import LLM

        if connector is not None:
            from vllm.config import KVTransferConfig

            options["kv_transfer_config"] = KVTransferConfig(**connector)
        if blocks := options.get("num_gpu_blocks_override"):
            print(f"{blocks} blocks", flush=True)  # noqa: T201 -- into the log
        commands = Commands(LLM(model, **options))
    except BaseException as error:
        pipe.send((False, f"no start: {type(error).__name__}: {error}"))
        raise
    pipe.send((True, time.monotonic() - begun))
    while True:
        name, arguments = pipe.recv()
        if name == "close":
            break
        try:
            pipe.send((True, getattr(commands, name)(*arguments)))
        except Exception as error:  # noqa: BLE001 -- the test gets it, whatever it is
            pipe.send((False, f"{name}: {type(error).__name__}: {error}"))
    commands.llm.llm_engine.engine_core.shutdown()
    os._exit(0)


def free_port() -> int:
    """A TCP port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Daemon:
    """`lmcache server` on a port; start, kill and start again."""

    folder: Path
    flags: Sequence[str] = ()
    port: int = field(default_factory=free_port)
    gib: float = 0.5

    def start(self) -> Self:
        """Start it; back when it answers."""
        command = [
            sys.executable, "-m", "lmcache_core", "server", "--host", "127.0.0.1",
            "--port", str(self.port), "--http-port", "none", "--prometheus-port", "none",
            "--l1-size-gb", str(self.gib), *self.flags,
        ]  # fmt: skip
        with open(self.folder / "daemon.log", "ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | self.env
            )
        wait(self._answers, 20, lambda: tail(self.folder / "daemon.log"))
        return self

    @property
    def env(self) -> dict[str, str]:
        """What engines need to find its socket."""
        return {"LMCACHE_RUNTIME_DIR": str(self.folder / "run")}

    @property
    def connector(self) -> dict[str, Any]:
        """The engine's side, in the words users have."""
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self.port,
            },
        }

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()

    def _answers(self) -> bool:
        assert self.process.poll() is None, f"no start\n{tail(self.folder / 'daemon.log')}"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def wait(there: Callable[[], bool], patience_s: float, why: Callable[[], str]) -> None:
    """Poll until something is there."""
    end = time.monotonic() + patience_s
    while not there():
        assert time.monotonic() < end, f"not there after {patience_s:.0f} s\n{why()}"
        time.sleep(0.05)


@contextlib.contextmanager
def daemon(folder: Path, *flags: str, gib: float = 0.5) -> Iterator[Daemon]:
    """A daemon for the length of a block."""
    folder.mkdir(parents=True, exist_ok=True)
    running = Daemon(folder, flags, gib=gib).start()
    try:
        yield running
    finally:
        running.stop()
