"""Any schedule: whatever comes in whatever order, no request samples from wrong bytes and none waits for ever."""

import os

from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from engines.vllm.tests.common import settled
from engines.vllm.tests.fake import Engine
from engines.vllm.tests.stand_ins import NAMES
from lmcache_core.spi import Key, Refusal
from tests.wire.daemons import wait_for

SCHEDULES = int(os.environ.get("LMCACHE_TEST_SCHEDULES", "12"))
"""More of them are for nights."""
FAMILIES = [list(range(n, n + 48)) for n in (0, 100)]

requests = st.tuples(
    st.just("add"),
    st.integers(0, 1),  # family of prompts
    st.integers(1, 40),  # of which so many tokens
    st.integers(0, 2),  # then so many of its own
    st.integers(1, 12),  # to generate
    st.sampled_from(["", "", "", "salt"]),
    st.sampled_from([None, None, {"lmcache.skip_save": True}, {"lmcache.max_offload_tokens": 12}]),
)
others = st.sampled_from(
    [
        ("step",), ("step",), ("step",), ("step",), ("evict",), ("abort",), ("reset",), ("own",),
        ("fail adopt",), ("fail dispatch",), ("fail reserve",), ("lose",), ("restart",),
    ]
)  # fmt: skip
SETTINGS = {
    "depth": st.integers(1, 2),
    "blocks": st.integers(16, 32),
    "budget": st.integers(3, 40),
    "most": st.sampled_from([None, None, 0, 8]),
    "hooked": st.sampled_from([2, 2, 1, 0]),
    "skip_last_n_tokens": st.sampled_from([0, 0, 5]),
    "canary": st.sampled_from([0.0, 0.0, 0.5]),
}


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


@settings(
    max_examples=SCHEDULES, phases=[Phase.explicit, Phase.generate]
)  # shrinking takes minutes
@example(
    how={"budget": 21, "most": None, "depth": 2, "blocks": 23}, save_decode=True, background=False,
    layerwise=False, ranks=2,
    history=[("add", 0, 33, 1, 2, "", None), ("add", 0, 33, 1, 2, "", None), ("own",)],
)  # fmt: skip
@given(
    how=st.fixed_dictionaries(SETTINGS),
    save_decode=st.booleans(),
    background=st.booleans(),
    layerwise=st.booleans(),
    ranks=st.sampled_from([1, 1, 2]),
    history=st.lists(st.one_of(requests, others), min_size=5, max_size=40),
)
def test_no_schedule_ends_in_wrong_bytes(
    daemon, how, save_decode, background, layerwise, ranks, history
):
    """Seen in LMCache#951, LMCache#817, LMCache/lmcache-tests#22, LMCache#2243."""
    model = f"any-{next(NAMES)}"
    flags = {
        "save_decode_cache": save_decode,
        "model": model,
        "async_load": background,
        "use_layerwise": layerwise,
        "ranks": ranks,
    }
    engine = Engine(daemon, **how, **flags)
    faults, epochs, ids = Faults(engine), 0, []
    try:
        for name, *args in history:
            if name == "add":
                family, shared, own, most, salt, wishes = args
                tokens = FAMILIES[family][:shared] + [200 + own] * own
                ids.append(engine.add(tokens, most, cache_salt=salt, kv_transfer_params=wishes))
            elif name == "step":
                engine.step()
            elif name == "abort" and ids:
                engine.abort(ids.pop(len(ids) // 2))
            elif name == "reset":
                epochs += 1
                engine.reset(f"weights {epochs}")
            elif name == "own":
                engine.pool.reset()
            elif name == "evict":
                client = engine.scheduler.client
                scheduler = engine.scheduler.scheduler
                keys = [(asked.chain.digests) for asked in scheduler.states.values()]
                client.delete([_key(scheduler, d) for digests in keys for d in digests[::2]])
            elif name.startswith("fail"):
                faults.left[name.split()[1]] += 1
            elif name == "lose":
                for half in (engine.scheduler, *engine.workers):
                    if half.client.home is not None:
                        half.client._lost(half.client.home)
            elif name == "restart" and not engine.requests and not epochs:
                for half in (engine.scheduler, *engine.workers):
                    wait_for(lambda half=half: half.client.home is not None)
                engine.close()
                engine = Engine(daemon, **how, **flags)
                faults = Faults(engine)
        engine.run()
        assert not engine.worker.off and not engine.scheduler.off
        for half in (
            engine.scheduler,
            *engine.workers,
        ):  # or nobody tells the daemon what has ended
            wait_for(lambda half=half: half.client.home is not None)
        settled(daemon)
    finally:
        engine.close()


def _key(scheduler, digest):
    return Key(scheduler.names.space or bytes(32), digest)
