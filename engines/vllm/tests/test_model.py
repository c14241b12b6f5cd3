"""Any schedule of any kind of model: no request samples from wrong bytes, none waits for ever, none is served too little.

The reference says for every question what may be served, and where nothing was lost on the way, what has to be.
"""

import os

import pytest
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st
from lmcache_engine_vllm import breaker, scheduler

from engines.vllm.tests.common import settled
from engines.vllm.tests.fake import Engine
from engines.vllm.tests.memory import groups_of
from engines.vllm.tests.reference import Reference
from engines.vllm.tests.stand_ins import NAMES, cache_config
from lmcache_core.spi import Key, Refusal
from tests.wire.daemons import wait_for

SCHEDULES = int(os.environ.get("LMCACHE_TEST_SCHEDULES", "6"))
"""Of each kind of model; more of them are for nights."""
FAMILIES = [list(range(n, n + 48)) for n in (0, 100)]
MODELS = {
    "full": ("full",),
    "window": ("full", "window"),
    "state": ("full", "state"),
    "all": ("window", "full", "state"),
}
SPREADS = [
    {},
    {"ranks": 2},
    {"ranks": 2, "replicas": 2},  # heads that both have
    {"ranks": 2, "replicas": 2, "mla": True},  # latents: every rank has all
]
PIPELINES = [{"stages": 2}, {"ranks": 2, "stages": 2}]
"""Of models with one group; with several a pipeline keeps nothing."""

SETTINGS = {
    "depth": [1, 2],
    "blocks": range(16, 33),
    "budget": range(3, 41),
    "most": [None] * 8 + [0, 8],
    "hooked": [2] * 6 + [1, 0],
    "skip_last_n_tokens": [0, 0, 5],
    "canary": [0.0] * 7 + [0.5],
    "save_decode_cache": [False, True],
    "async_load": [False, True],
    "use_layerwise": [False, True],
}
WISHES = [None] * 4 + [{"lmcache.skip_save": True}, {"lmcache.max_offload_tokens": 12}]
EVENTS = ["add"] * 8 + ["step"] * 9 + ["run"] * 3 + ["own"] * 2 + ["abort", "reset", "restart"]
TROUBLE = ["evict", "fail adopt", "fail dispatch", "fail reserve", "lose"]


def request(draw):
    """Tokens, how many to generate, salt and wishes: so much of a family, then a few tokens of its own."""
    own = draw.randrange(3)
    tokens = draw.choice(FAMILIES)[: draw.randint(1, 40)] + [200 + own] * own
    return tokens, draw.randint(1, 12), draw.choice(["", "", "", "salt"]), draw.choice(WISHES)


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    monkeypatch.setattr(scheduler, "AGAIN", 0.0)
    monkeypatch.setattr(breaker, "CALL", 30.0)


@pytest.fixture(scope="module")
def watcher(daemon):
    client = daemon.client(timeout=30.0)
    yield client
    client.close()


class Faults:
    """Plants single failures between the halves and the daemon."""

    def __init__(self, engine):
        self.engine, self.left = engine, {"adopt": 0, "dispatch": 0, "reserve": 0}
        worker, scheduler = engine.workers[-1].client, engine.scheduler.client
        self._plant(worker, "adopt", lambda given: worker.release(given or ()))
        self._plant(scheduler, "dispatch", lambda given: None, before=True)
        self._plant(
            worker,
            "reserve",
            lambda given: [worker.abort(held) for held in given if not isinstance(held, Refusal)],
        )

    def _plant(self, client, name, undo, before=False):
        real = getattr(client, name)

        def planted(*args, **how):
            if self.left[name]:
                self.left[name] -= 1
                undo(None if before else real(*args, **how))
                return self._answer(name, args)
            return real(*args, **how)

        setattr(client, name, planted)

    def _answer(self, name, args):
        return [Refusal.UNWANTED] * len(args[0]) if name == "reserve" else None


def flags(draw, kinds):
    """Those of an engine."""
    spread = draw.choice([{}, *SPREADS, *PIPELINES * (kinds == "full")])
    how = {name: draw.choice(choices) for name, choices in SETTINGS.items()} | spread
    how |= {"kinds": MODELS[kinds], "blocks": how["blocks"] * (1 + (kinds != "full"))}
    return how | {"daemon.timeout": 30.0, "model": f"any-{next(NAMES)}"}


def reference(how, troubled):
    """Where something is lost, or not all of an offer is taken as it is, only what may be served is known."""
    several = len(how["kinds"]) > 1
    lossy = troubled or (how["most"] is not None and several) or (how["canary"] and not several)
    late = how["use_layerwise"] and how["hooked"] < 2
    return Reference(
        groups_of(cache_config(1, how["kinds"]), how["kinds"]), exact=not (lossy or late),
        skip_last=how["skip_last_n_tokens"], save_decode=how["save_decode_cache"],
    )  # fmt: skip


@settings(max_examples=SCHEDULES, phases=[Phase.generate])  # shrinking takes minutes
@given(draw=st.randoms(use_true_random=True))
@pytest.mark.parametrize("kinds", MODELS)
def test_no_schedule_ends_in_wrong_bytes(daemon, watcher, kinds, draw):
    """Seen in LMCache#951, LMCache#817, LMCache/lmcache-tests#22, LMCache#2243."""
    how, troubled = flags(draw, kinds), draw.random() < 0.4
    note(f"{how}, troubled: {troubled}")
    how["reference"] = reference(how, troubled)
    engine = started(daemon, how)
    faults, epochs, ids, prompts = Faults(engine), 0, [], {}
    try:
        for _ in range(draw.randint(10, 40)):
            name = draw.choice(TROUBLE if troubled and draw.random() < 0.12 else EVENTS)
            if name == "add":
                tokens, most, salt, wishes = given = request(draw)
                note(str(given))
                ids.append(engine.add(tokens, most, cache_salt=salt, kv_transfer_params=wishes))
                prompts[(*tokens, 7)] = salt
            else:
                note(name)
            if name == "step":
                engine.step()
            elif name == "run":
                engine.run()
            elif name == "abort" and ids:
                engine.abort(ids.pop(len(ids) // 2))
            elif name == "reset":
                epochs += 1
                engine.reset(f"weights {epochs}")
            elif name == "own":
                engine.pool.reset()
            elif name == "evict":
                evict(engine)
            elif name.startswith("fail"):
                faults.left[name.split()[1]] += 1
            elif name == "lose":
                for half in (engine.scheduler, *engine.workers):
                    if half.client.home is not None:
                        half.client._lost(half.client.home)
            elif name == "restart" and not engine.requests and not epochs:
                home(engine)
                engine.close()
                engine = started(daemon, how)
                faults = Faults(engine)
        engine.run()
        home(engine)
        engine.pool.reset()
        for tokens, salt in [*prompts.items()][:6]:  # once more, by what the cache has
            engine.add(tokens, cache_salt=salt)
        engine.run()
        assert not any(half.off for half in (engine.scheduler, *engine.workers))
        home(engine)  # they tell the daemon what has ended
        settled(daemon, watcher)
    finally:
        engine.close()


def started(daemon, how):
    engine = Engine(daemon, **how)
    wait_for(engine.scheduler.scheduler.names.ready)
    return engine


def home(engine):
    for half in (engine.scheduler, *engine.workers):
        wait_for(lambda half=half: half.client.home is not None)
        half.client.nudge()


def evict(engine):
    """Half of all chunks of the requests that are there."""
    asked = engine.scheduler.scheduler
    chains = [each.chain.digests[::2] for each in asked.states.values()]
    space, groups = asked.names.space or bytes(32), range(len(engine.groups))
    engine.scheduler.client.delete(
        [Key(space, d, n) for chain in chains for d in chain for n in groups]
    )
