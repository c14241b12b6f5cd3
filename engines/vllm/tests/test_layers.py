"""Layer by layer, where the engine calls hooks around its layers: loads right before, stores right after."""

import pytest

from engines.vllm.tests.common import PROMPT, lose_leases, served, settled


@pytest.fixture
def copied(monkeypatch):
    """What is copied out of an engine's blocks, and when."""

    def watch(engine, seen):
        for worker in engine.workers:
            real = worker.worker.connector.pack
            monkeypatch.setattr(
                worker.worker.connector,
                "pack",
                lambda *given, real=real, **how: seen.append(how["layers"]) or real(*given, **how),
            )

    return watch


@pytest.mark.parametrize("hooked", [1, 2])
def test_layers_are_loaded_as_they_are_read_or_not_at_all(make, monkeypatch, hooked):
    """Seen in LMCache#2934."""
    served(make(ranks=2), PROMPT)
    engine = make(ranks=2, use_layerwise=True, hooked=hooked)
    filled = []
    worker = engine.worker.worker
    real = worker._fill
    monkeypatch.setattr(worker, "_fill", lambda *given: filled.append(given[2:]) or real(*given))
    assert served(engine, PROMPT) == 40
    assert filled == [(0,), (1,)][:hooked]
    assert engine.recomputed == 2 - hooked
    engine.pool.reset()
    assert served(engine, PROMPT) == 40
    assert engine.recomputed == 2 - hooked


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("hooked", [0, 1, 2])
def test_layers_are_kept_as_they_are_computed_and_the_rest_at_the_end(make, copied, hooked, ranks):
    engine, seen = make(ranks=ranks, use_layerwise=True, hooked=hooked, budget=64), []
    copied(engine, seen)
    assert served(engine, PROMPT) == 0
    chunks = 5 * ranks
    if hooked:
        assert sorted(seen) == [(0,)] * chunks + [(1,)] * chunks
        assert seen[:chunks] == [(0,)] * chunks
    assert served(make(ranks=ranks), PROMPT) == 40


def test_a_layer_that_is_computed_twice_is_kept_as_it_is_at_last(make):
    engine = make(use_layerwise=True, budget=64)
    worker, real = engine.workers[0], engine.workers[0].computed

    def half_first(name):
        memory = engine.memory.cells[0][name]
        right = memory.copy()
        memory[:] = 0x5A  # another half of the batch is not computed yet
        real(name)
        memory[:] = right
        real(name)

    worker.computed = half_first
    assert served(engine, PROMPT) == 0
    worker.computed = real
    engine.pool.reset()
    assert served(engine, PROMPT) == 40


def test_nothing_is_kept_on_top_of_layers_that_could_not_be_loaded(make, monkeypatch, daemon):
    served(make(), PROMPT[:24])
    engine = make(use_layerwise=True, budget=64)
    with monkeypatch.context() as planted:
        lose_leases(planted, engine.worker)
        assert served(engine, PROMPT) == 24
    assert engine.recomputed >= 1
    assert served(make(), PROMPT) == 40
    settled(daemon)


def test_an_error_between_two_layers_gives_back_what_was_reserved(make, monkeypatch, daemon):
    engine = make(use_layerwise=True, budget=64)
    storing = engine.worker.worker.storing
    monkeypatch.setattr(storing, "_copy", lambda *given: 1 // 0)
    assert served(engine, PROMPT) == 0
    assert engine.worker.off
    settled(daemon)
    assert served(make(), PROMPT) == 0
