"""A daemon knows the key spaces of models that run on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines.transformers.tests.tiny import CHUNK, cached, greedy, make_model, prompt
from lmcache_core.engine import Cache
from lmcache_core.wire import records, replies
from lmcache_core.wire.client import DaemonClient
from tests.wire.daemons import Daemon

pytest.importorskip("lmcache_server")


def engines(cache: Cache) -> dict[str, Any]:
    assert isinstance(cache.storage, DaemonClient)
    document = json.loads(cache.storage.ask(replies.Document, records.Describe).json)
    found: dict[str, Any] = document["engines"]
    return found


def test_a_daemon_knows_the_key_space_and_its_chunks(tmp_path: Path) -> None:
    with (
        Daemon(tmp_path, "--chunk-size", str(CHUNK)) as daemon,
        Cache.from_config(daemon={"socket": daemon.path}) as cache,
    ):
        served, ids = cached(make_model(), cache), prompt(3 * CHUNK)
        first = greedy(served, ids)
        ((name, found),) = engines(cache).items()
        assert name.startswith("LlamaForCausalLM-")
        assert found["space"] == served.space.digest.hex()
        assert (found["missing"], found["chunk_tokens"]) == ([], [CHUNK])
        assert greedy(served, ids) == first
        assert served.last.reused == (3 * CHUNK - 1,)
        served.model.lm_head.weight.data.mul_(2)
        served.refresh()
        greedy(served, ids)
        assert len(engines(cache)) == 2
