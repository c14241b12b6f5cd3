"""``Cache`` on a daemon: what one engine process computes the next one loads, token for token."""

import json
import subprocess
import sys

import pytest

from lmcache_core.config import load
from lmcache_core.engine import Cache
from lmcache_core.spi import ConfigError
from tests.wire.daemons import Daemon, describe, free_port, wait_for

pytest.importorskip("torch")

SCRIPT = """
import json, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from lmcache_core.engine import Cache
from lmcache_engine_transformers import CachedModel
torch.manual_seed(0)
torch.set_num_threads(1)
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=200,
)).eval()
ids = torch.arange(100).reshape(1, 100) % 200
options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
plain = model.generate(ids, **options)
with Cache.from_config({"daemon": json.loads(sys.argv[1])}) as cache:
    cached = CachedModel(model, cache)
    out = cached.generate(ids, **options)
    print(json.dumps({
        "reused": cached.last.reused[0], "stored": cached.last.stored[0],
        "equal": out.equal(plain), "chunk": cache.config.engine.chunk_size,
    }))
"""


def engine(daemon):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(daemon)],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["shared-rw", "sealed"])
def test_second_process_reuses_what_the_first_computed(tmp_path, mode):
    """Seen in LMCache#2511."""
    port = free_port()
    with Daemon(tmp_path, "--arena-mode", mode, "--chunk-size", "16", port=port) as daemon:
        by_socket, by_port = {"socket": daemon.path}, {"host": "localhost", "port": port}
        first = engine(by_socket)
        assert first == {"reused": 0, "stored": 96, "equal": True, "chunk": 16}
        second = engine(by_port)
        assert second == {"reused": 96, "stored": 0, "equal": True, "chunk": 16}
        client = daemon.client()
        wait_for(lambda: describe(client)["memory"]["leased"] == 0)
        client.close()


def test_cache_without_its_daemon_works_and_finds_nothing(tmp_path):
    with Cache.from_config({"daemon": {"socket": f"{tmp_path}/none.sock"}}) as cache:
        assert cache.fidelity == "exact"
        assert cache.usage() == []


def test_names_users_know_lead_to_the_daemon():
    config = load(env={}, flags={"mp_host": "tcp://localhost", "mp_port": 6000}).config
    assert config.daemon.address == "tcp://localhost:6000"
    with pytest.raises(ConfigError, match="three ways"):
        load(env={}, flags={"daemon": {"host": "a", "private": True}})
