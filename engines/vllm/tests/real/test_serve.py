"""`vllm serve` as users start it, asked through the OpenAI client; the published lines as they stand.

Added to each line is only what a CPU needs: float32, no compiler, a shorter context.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine import ENVIRONMENT, Answer, Engine, daemon, free_port, tail, wait
from judging import differences, full, make_prompts

VLLM = str(Path(sys.executable).with_name("vllm"))
ON_A_CPU = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
PROMPTS = [prompt for prompt in make_prompts(12, seed=4) if len(prompt) > 200][:6]
TOKENS = 32


@dataclass(frozen=True, slots=True)
class Served:
    """A server that answers on ``port``."""

    port: int
    log: Path
    process: subprocess.Popen[bytes]

    def complete(self, prompt: Sequence[int], **wishes: object) -> list[int]:
        """What the OpenAI client gets, back in ids."""
        import openai

        with openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none") as client:
            model = client.models.list().data[0].id
            done = client.completions.create(
                model=model, prompt=list(prompt), max_tokens=TOKENS, temperature=0,
                extra_body={"ignore_eos": True, "kv_transfer_params": wishes or None},
            )  # fmt: skip
        assert done.choices[0].finish_reason == "length"
        return [int(word.removeprefix("t")) for word in done.choices[0].text.split()]

    def metric(self, pattern: str) -> float:
        """Sum of the samples at /metrics whose name and labels match."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(pattern, line))

    def external(self) -> int:
        """Prompt tokens that came through the connector."""
        source = 'vllm:prompt_tokens_by_source_total{.*source="external_kv_transfer"'
        return int(self.metric(source))

    def local(self) -> int:
        """Prompt tokens that came from vLLM's own prefix cache."""
        return int(self.metric('vllm:prompt_tokens_by_source_total{.*source="local_cache_hit"'))

    def forget(self) -> None:
        """Empty vLLM's own prefix cache."""
        url = f"http://127.0.0.1:{self.port}/reset_prefix_cache"
        with urllib.request.urlopen(urllib.request.Request(url, method="POST")):
            pass


@contextlib.contextmanager
def serve(
    model: Path, log: Path, *flags: str, command: Sequence[str] = (), env: dict[str, str] | None = None
) -> Iterator[Served]:  # fmt: skip
    """`vllm serve` on a free port, ended by SIGTERM as a service manager does."""
    port = free_port()
    words = [*command, VLLM, "serve", str(model), *flags, *ON_A_CPU, "--port", str(port)]
    given = os.environ | ENVIRONMENT | {"VLLM_SERVER_DEV_MODE": "1"} | (env or {})
    with open(log, "wb") as out:
        process = subprocess.Popen(
            words, stdout=out, stderr=out, env=given, start_new_session=True, cwd=log.parent
        )
    served = Served(port, log, process)
    try:
        wait(lambda: _healthy(served), 240, lambda: tail(log, 80))
        yield served
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answers(path: Path) -> bool:
    """Whether somebody listens on a unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _healthy(served: Served) -> bool:
    assert served.process.poll() is None, f"no start\n{tail(served.log, 80)}"
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{served.port}/health", timeout=5):
            return True
    except OSError:
        return False


@pytest.fixture(scope="module")
def plain(model: Callable[[str], Path], folder: Path) -> list[Answer]:
    """What the engine says without a cache."""
    options = {"enable_prefix_caching": False}
    with Engine(model("llama"), folder / "plain.log", options=options) as engine:
        return engine.generate(PROMPTS, tokens=TOKENS)


def asked(served: Served) -> list[Answer]:
    """All answers; a server does not tell how far the logits lay apart."""
    return [Answer(served.complete(prompt), [], 0, "length") for prompt in PROMPTS]


def check_hits(served: Served, plain: list[Answer]) -> None:
    """Ask again, vLLM's own cache emptied in between: equal answers, every full block from ours.

    Where the machine is so busy that a call misses its deadline there are fewer hits, once.
    """
    differences(asked(served), plain)
    wanted = sum(full(len(prompt)) for prompt in PROMPTS)
    for lap in range(4):
        served.forget()
        before, own = served.external(), served.local()
        differences(asked(served), plain)
        hits, local = served.external() - before, served.local() - own
        print(f"lap {lap}: {hits} tokens from us, {local} from vLLM, of {wanted}")  # noqa: T201
        assert hits > local
        if hits + local == wanted:
            return
    raise AssertionError(f"{hits} + {local} tokens served, not {wanted}\n{tail(served.log)}")


def check_wishes(served: Served) -> None:
    """What a single request says of itself: keep nothing, keep one chunk, keep everything."""
    prompt = [7, *make_prompts(1, seed=12, longest=400)[0], *range(4, 400)][:390]
    found = []
    for wish in ({"lmcache.skip_save": True}, {"lmcache.max_offload_tokens": 200}, {}, {}):
        served.forget()
        before = served.external()
        served.complete(prompt, **wish)
        found.append(served.external() - before)
    assert found[:2] == [0, 0]
    assert found[2:] == [128, 384] or "gives no answer in time" in served.log.read_text()


def check_events(replay: str) -> None:
    """A router that joins late is told of every chunk that was kept: once, and behind which other one."""
    import msgspec
    import zmq

    context, said = zmq.Context(), []
    with context, context.socket(zmq.DEALER) as asking:
        asking.connect(replay)
        asking.send_multipart([b"", (0).to_bytes(8, "big")])
        while True:
            assert asking.poll(60_000), "no replay"
            *_, payload = asking.recv_multipart()
            if not payload:  # the end
                break
            said += msgspec.msgpack.decode(payload)[1]
    ours = [each for each in said if each["type"] == "BlockStored" and each["medium"] == "CPU"]
    kept = {each["block_hashes"][0]: each for each in ours}
    assert len(kept) == len(ours) > 0
    for each in ours:
        ids, size = each["token_ids"], each["block_size"]
        while each["parent_block_hash"] is not None:
            each = kept[each["parent_block_hash"]]
            ids = each["token_ids"] + ids
        assert size == 128
        assert any(prompt[: len(ids)] == ids for prompt in PROMPTS)


def test_the_published_line_of_the_name_in_the_process(
    model: Callable[[str], Path], folder: Path, plain: list[Answer]
) -> None:
    """`LMCACHE_CHUNK_SIZE=8 vllm serve MODEL --kv-transfer-config '{"kv_connector":"LMCacheConnectorV1",...`"""
    line = ["--kv-transfer-config", '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}']
    runtime = folder / "private"
    env = {"LMCACHE_CHUNK_SIZE": "8", "LMCACHE_RUNTIME_DIR": str(runtime), "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.3"}  # fmt: skip
    log = folder / "v1.log"
    with serve(model("llama"), log, *line, env=env) as served:
        check_hits(served, plain)
    wait(lambda: not any(map(answers, runtime.glob("*.sock"))), 60, lambda: "its daemon stays")
    written = log.read_text(errors="replace")
    assert written.count("chunk size 8 is rounded up to 128") == 1
    assert len(re.findall(r"LMCache \S+ for vLLM \S+: \w+ daemon at ", written)) == 1
    assert "Stored" in written
    assert "Retrieved" in written


def test_the_published_lines_of_the_shared_daemon(
    model: Callable[[str], Path], folder: Path, plain: list[Answer]
) -> None:
    """`lmcache server --chunk-size 16`, then `vllm serve` with LMCacheMPConnector and its host and port."""
    publish, replay = (f"ipc://{folder}/{name}.ipc" for name in ("events", "replay"))
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": publish, "replay_endpoint": replay}  # fmt: skip
    with daemon(folder / "daemon", "--chunk-size", "16") as running:
        transfer = json.dumps(running.connector)
        flags = ["--kv-transfer-config", transfer, "--kv-events-config", json.dumps(events)]
        with serve(model("llama"), folder / "mp.log", *flags, env=running.env) as served:
            check_hits(served, plain)
            assert served.metric("lmcache_loaded_tokens_total") == served.external()
            assert served.metric("lmcache_failed_load_tokens_total") == 0
            check_events(replay)
            check_wishes(served)


def test_the_offloading_flags_start_a_private_daemon_of_that_size(
    model: Callable[[str], Path], folder: Path, plain: list[Answer]
) -> None:
    """`--kv-offloading-backend lmcache --kv-offloading-size 0.25`, here as arguments of ``LLM``."""
    options = {"kv_offloading_backend": "lmcache", "kv_offloading_size": 0.25}
    env = {"LMCACHE_RUNTIME_DIR": str(folder / "offload"), "LMCACHE_CHUNK_SIZE": "128"}
    with Engine(model("llama"), folder / "offload.log", env=env, options=options) as engine:
        for _ in range(2):
            answers = engine.generate(PROMPTS, tokens=TOKENS, one_by_one=True)
            differences(answers, plain)
            assert engine.call("reset_prefix_cache")
        assert [answer.cached for answer in answers] == [full(len(p)) for p in PROMPTS]
        assert engine.call("external") > 0
        (path,) = (folder / "offload").glob("*.sock")
        command = [sys.executable, "-m", "lmcache_core", "describe", "--json"]
        asked = subprocess.run(
            [*command, "--daemon", f"unix://{path}"], capture_output=True, check=True
        )
    assert json.loads(asked.stdout)["memory"]["capacity"] == 256 << 20
