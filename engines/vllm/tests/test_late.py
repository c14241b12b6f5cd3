"""Daemons that come, stop or change while an engine starts or runs: hits are lost, never bytes and never time."""

import logging
import signal
import time

import pytest
from lmcache_engine_vllm import breaker, halves

from engines.vllm.tests import fake
from engines.vllm.tests.common import PROMPT, served
from engines.vllm.tests.fake import Engine
from lmcache_core.spi import ConfigError
from lmcache_core.wire import records, replies
from tests.wire.daemons import Daemon, wait_for

LONG = [number % 97 for number in range(600)]
"""Several chunks of either size."""


def between(monkeypatch, what):
    """Do something after an engine's ranks have started and before its scheduler does."""
    real = halves.Halves

    def made(config, cache, scheduling, *, shared):
        if scheduling:
            what()
        return real(config, cache, scheduling, shared=shared)

    monkeypatch.setattr(halves, "Halves", made)


def meet(engine):
    """Let ranks and scheduler find the daemon."""
    for half in (engine.scheduler, engine.worker):
        wait_for(lambda half=half: half.client.home is not None)
    served(engine, [7] * 9)  # ranks register with their next step
    return engine.scheduler.scheduler.names.ready()


@pytest.fixture
def unsized(monkeypatch):
    """Engines that chunk as their daemon does."""
    real = fake.config

    def config(*given, **how):
        made = real(*given, **how)
        del made.kv_transfer_config.kv_connector_extra_config["lmcache.chunk_size"]
        return made

    monkeypatch.setattr(fake, "config", config)


def test_a_daemon_that_comes_between_the_halves_gives_no_wrong_byte(
    tmp_path, model, monkeypatch, unsized
):
    """Ranks that found none chunk by their own default; the scheduler follows them, not the daemon it finds."""
    with Daemon(tmp_path, "--arena-mode", "shared-rw", "--chunk-size", "128") as late:
        late.kill()
        between(monkeypatch, late.start)
        engine = Engine(late, model=model, blocks=320, budget=4000)
        assert (engine.worker.chunk, engine.scheduler.chunk) == (256, 128)
        wait_for(lambda: meet(engine))
        assert served(engine, LONG) == 0
        engine.pool.reset()
        assert served(engine, LONG) == 512
        engine.close()


def test_a_daemon_that_turns_lossy_serves_no_engine_that_was_started_without(
    tmp_path, model, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("lmcache"), "propagate", True)
    settings = tmp_path / "cache.yaml"
    tiers = "[{{cpu: {{size: 64MiB}}}}, {{disk: {{path: {0}/kv, size: 64MiB{1}}}}}]\n"
    settings.write_text(f"chunk_size: 8\ntiers: {tiers.format(tmp_path, '')}")
    with Daemon(tmp_path, "--arena-mode", "shared-rw", "--config", str(settings)) as daemon:
        engine = Engine(daemon, model=model, exact=True)
        assert served(engine, PROMPT) == 0
        engine.pool.reset()
        assert served(engine, PROMPT) == 40
        settings.write_text(f"chunk_size: 8\ntiers: {tiers.format(tmp_path, ', serde: [quant]')}")
        daemon.kill()
        daemon.start()
        for half in (engine.scheduler, engine.worker):
            wait_for(lambda half=half: half.client.home is not None)
        engine.pool.reset()
        assert served(engine, PROMPT) == 0
        name = engine.given.kv_transfer_config.engine_id
        asked = engine.scheduler.client.ask(
            replies.Registered, lambda id: records.Register(id, name, -1, 1)
        )
        assert asked.missing == [0]
        assert "it runs without a cache until it is started again" in caplog.text
        with pytest.raises(ConfigError, match="exact: true forbids that"):
            Engine(daemon, model=model, policy="exact")
        told = "what they give back also enters vLLM's own prefix cache"
        assert told not in caplog.text
        approximate = Engine(daemon, model=model, canary=1.0)  # which would find every hit wrong
        assert told in caplog.text
        assert served(approximate, PROMPT) == 0
        approximate.pool.reset()
        assert served(approximate, PROMPT) == 40
        for each in (engine, approximate):
            each.close()


def test_a_daemon_that_stops_before_it_knows_an_engine_costs_it_one_wait(
    tmp_path, model, monkeypatch
):
    """It was found again, so every step would ask it anew."""
    with Daemon(tmp_path, "--arena-mode", "shared-rw") as daemon:
        engine = Engine(daemon, model=model, blocks=60)
        served(engine, PROMPT)
        daemon.kill()
        daemon.start()
        for half in (engine.scheduler, engine.worker):
            wait_for(lambda half=half: half.client.home is not None)
        daemon.send(signal.SIGSTOP)
        monkeypatch.setattr(breaker, "CALL", 0.05)
        monkeypatch.setattr(breaker, "PAUSE", (600.0, 600.0))
        waits = []
        for half in (engine.scheduler, engine.worker):
            real = half.client.ask

            def ask(kind, make, until, real=real):
                waits.append(until - time.monotonic())
                return real(kind, make, until)

            monkeypatch.setattr(half.client, "ask", ask)
        for number in range(8):
            served(engine, [number] * 9)
        assert len(waits) == 2  # each half once
        assert max(waits) <= 0.05
        engine.close()
