"""What an engine says of its own speed, and that nobody waits longer for a slow tier than for the engine itself."""

import random
import time

import pytest
from lmcache_engine_vllm import pace, scheduler
from lmcache_engine_vllm.pace import Pace

from engines.vllm.tests.common import PROMPT, keys, served
from engines.vllm.tests.fake import Engine
from engines.vllm.tests.stand_ins import CHUNK
from tests.wire.daemons import Daemon, wait_for


class Measured:
    """A pace on a clock that stands unless it is told to go."""

    def __init__(self, **how):
        self.time, self.said = 5.0, []
        report = lambda tokens, seconds: self.said.append((tokens, pytest.approx(seconds)))  # noqa: E731
        self.pace = Pace(report, CHUNK, now=lambda: self.time, **how)

    def step(self, seconds, *sizes, loads=False):
        self.pace.begin(sizes, loads)
        self.time += seconds
        self.end()

    def end(self):
        self.pace.heard()
        self.pace.end()


def test_a_step_takes_from_its_order_to_its_output():
    engine = Measured()
    engine.step(0.5, 16, 8)
    engine.time += 100  # nobody asks
    engine.step(0.25, 8)
    assert engine.said == [(24, 0.5), (8, 0.25)]


def test_steps_that_load_or_decode_tell_nothing():
    engine = Measured()
    engine.step(0.5, 16, loads=True)
    engine.step(0.5, 1, 1, CHUNK - 1)
    engine.step(0.5)
    assert engine.said == []
    engine.step(0.5, 1, CHUNK)
    assert engine.said == [(CHUNK, 0.5)]


def test_steps_ordered_ahead_are_measured_together():
    engine = Measured()
    for size in (16, 16, 1):
        engine.pace.begin([size], False)
    for seconds in (1.0, 1.0, 0.1):
        engine.time += seconds
        engine.end()
    engine.time += 100
    engine.end()  # an output that was never ordered
    assert engine.said == [(32, 2.0)]


def test_steps_that_are_computed_at_the_same_time_are_measured_apart():
    engine = Measured(overlap=True)
    engine.pace.begin([16], False)
    engine.pace.begin([16], False)
    for _ in range(2):
        engine.time += 1.0
        engine.end()
    assert engine.said == [(16, 1.0), (16, 2.0)]


def test_a_scheduler_that_takes_events_while_it_orders_tells_nothing():
    engine = Measured()
    for _ in range(3):
        engine.pace.begin([16], False)
        engine.pace.end()
        engine.time += 1.0
        engine.pace.heard()
    assert engine.said == []


@pytest.mark.parametrize("lost", [0.0, 0.05])
@pytest.mark.parametrize("seed", range(20))
def test_no_step_seems_shorter_than_it_was(seed, lost):
    """A device computes in order what is ordered ahead of it; its outputs are taken up late, or not at all."""
    source = random.Random(seed)
    depth = source.choice([1, 2, 3])
    clock, device, under_way, real = 0.0, 0.0, [], []
    said = []
    measured = Pace(lambda *told: said.append(told), CHUNK, now=lambda: clock)
    for number in range(400):
        clock += source.choice([0.0, 0.001, 0.05, 1.0])  # what schedulers do meanwhile
        size, loads = source.choice([1, 1, CHUNK + number]), source.random() < 0.1
        measured.begin([size], loads)
        begun, took = max(clock, device), source.uniform(0.01, 0.4)
        device = begun + took
        under_way.append(device)
        if size > 1 and not loads:
            real.append((size, took))
        if len(under_way) >= depth:
            clock = max(clock, under_way.pop(0))
            if source.random() >= lost:
                measured.heard()
                measured.end()
    assert len(said) > (50 if depth == 1 else 10)
    for tokens, seconds in said:  # the oldest that were not told of yet
        while tokens:
            size, took = real.pop(0)
            tokens, seconds = tokens - size, seconds - took
        assert tokens == 0 and seconds > -1e-9


def test_a_long_prompt_seems_little_longer_than_it_was():
    engine, count = Measured(), 5 * pace.RUN
    engine.pace.begin([16], False)
    for _ in range(count):
        engine.pace.begin([16], False)
        engine.time += 1.0
        engine.end()
    assert sum(tokens for tokens, _ in engine.said) == 16 * count
    assert engine.said[1:] == [(16 * pace.RUN, pace.RUN + 1.0)] * 4


@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_tells_what_it_computes_and_not_what_it_loads(make, depth):
    engine, clock, said = make(depth=depth), [0.0], []
    told = engine.scheduler.pace
    told._report, told._now = lambda *each: said.append(each), lambda: clock[0]
    execute = engine.execute

    def slowly(out, step):
        execute(out, step)
        clock[0] += sum(out.num_scheduled_tokens.values())

    engine.execute = slowly
    served(engine, PROMPT)
    assert sum(tokens for tokens, _ in said) == 16 + 16 + 9
    assert all(tokens <= seconds < 2.5 * tokens for tokens, seconds in said)
    engine.pool.reset()
    del said[:]
    assert served(engine, PROMPT) == 40
    assert said == []


def test_a_slow_tier_is_waited_for_no_longer_than_computing_takes(tmp_path, model, monkeypatch):
    monkeypatch.setattr(scheduler, "RESIDENT", 0.0)
    monkeypatch.setattr(scheduler, "PATIENCE", 15.0)
    settings = tmp_path / "cache.yaml"
    disk = f"path: {tmp_path}/kv, size: 256MiB"

    def write(*more):
        tiers = f"[{{cpu: {{size: 64MiB}}}}, {{disk: {{{', '.join((disk, *more))}}}}}]"
        settings.write_text(f"chunk_size: 8\ntiers: {tiers}\n")

    write()
    with Daemon(tmp_path, "--arena-mode", "shared-rw", "--config", str(settings)) as daemon:
        engine = Engine(daemon, model=model)
        served(engine, PROMPT)
        engine.scheduler.client.flush()
        daemon.kill()
        write("deadline: 30s", "wrappers: {chaos: {delay: 1.0, delay_s: 600}}")
        daemon.start()
        for half in (engine.scheduler, engine.worker):
            wait_for(lambda half=half: half.client.home is not None)
        engine.pool.reset()
        told = []
        report = engine.scheduler.client.report_prefill
        engine.scheduler.pace._report = lambda *each: (told.append(each), report(*each))
        served(engine, [7] * 32)
        assert sum(tokens for tokens, _ in told) == 32
        id = engine.add(PROMPT)
        wait_for(engine.scheduler.scheduler.names.ready)
        found = engine.scheduler.client.lookup
        wait_for(lambda: found(keys(engine)).leading == 5)
        began = time.monotonic()
        wait_for(lambda: engine.scheduler.matched(engine.requests[id], 0)[0] is not None)
        waited = time.monotonic() - began
        computing = sum(seconds for _, seconds in told) / 32 * 40
        assert waited < 2 * computing + 5.0
        engine.run()
        assert engine.external == engine.recomputed == 0
        engine.close()
