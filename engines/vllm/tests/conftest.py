"""One daemon for the tests without an engine."""

import pytest
from lmcache_engine_vllm import breaker, engine

from tests.wire.daemons import Daemon


@pytest.fixture(scope="session")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("d"), "--arena-mode", "shared-rw") as found:
        yield found


@pytest.fixture(autouse=True)
def release(monkeypatch):
    monkeypatch.setattr(engine, "release", lambda: "0.0-test")
    monkeypatch.setattr(breaker, "CALL", 5.0)  # a busy machine is no deaf daemon
