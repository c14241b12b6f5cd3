"""One daemon for the tests without an engine."""

import itertools
import sys
from types import SimpleNamespace

import pytest
from lmcache_engine_vllm import breaker, engine

from engines.vllm.tests.common import settled
from engines.vllm.tests.fake import Engine
from tests.wire.daemons import Daemon

MODELS = (f"model-{n}" for n in itertools.count())


@pytest.fixture(scope="session")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("d"), "--arena-mode", "shared-rw") as found:
        yield found


@pytest.fixture(autouse=True)
def release(monkeypatch):
    monkeypatch.setattr(engine, "release", lambda: "0.0-test")
    monkeypatch.setattr(breaker, "CALL", 5.0)  # a busy machine is no deaf daemon
    monkeypatch.setitem(
        sys.modules, "vllm.distributed.utils", SimpleNamespace(get_pp_indices=stage)
    )


def stage(layers, number, count):
    """vLLM's own cut of a pipeline, where it comes out even."""
    return number * layers // count, (number + 1) * layers // count


@pytest.fixture
def model():
    return next(MODELS)


@pytest.fixture
def make(daemon, model):
    made = []

    def make(**how):
        made.append(Engine(daemon, **{"model": model} | how))
        return made[-1]

    yield make
    settled(daemon)  # nothing stays leased or reserved, whatever happened
    for each in made:
        each.close()
