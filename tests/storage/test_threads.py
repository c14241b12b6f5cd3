"""Engines call from threads of their own while the loop writes and evicts."""

from __future__ import annotations

import random
import threading

from lmcache_core.config import Config, TierConfig
from lmcache_core.spi import ByteSize, Refusal, Unavailable
from lmcache_core.storage.build import build
from lmcache_core.storage.sync import SyncManager
from lmcache_core.testing.worlds import PAGE, fill, frame_nbytes, key_of, verify_lease
from tests.storage.test_build import registry

ROUNDS, WORKERS = 150, 4
TIERS = (
    TierConfig(plugin="memory", name="one", size=ByteSize(40 * frame_nbytes(PAGE))),
    TierConfig(plugin="memory", name="two", size=ByteSize(90 * frame_nbytes(PAGE))),
)


def work(manager, seed, failures):
    source, owner = random.Random(seed), f"worker {seed}"
    try:
        for _ in range(ROUNDS):
            start = source.randrange(30) * 5
            keys = [key_of(start + at) for at in range(source.randint(1, 5))]
            loaded = manager.load(keys, owner)
            for lease in loaded.leases:
                verify_lease(lease)
            manager.release(loaded.leases)
            rest = [(key, frame_nbytes(PAGE)) for key in keys[len(loaded.leases) :]]
            grants = manager.reserve(rest, owner)
            held = [each for each in grants if not isinstance(each, Refusal)]
            if held and source.random() < 0.1:
                manager.abort(held.pop())
            manager.commit_batch(held, [fill(each) for each in held])
            if source.random() < 0.02:
                manager.delete(keys)
    except BaseException as error:  # told by the test
        failures.append(error)
        raise


def test_threads_and_the_loop_do_not_disturb_each_other(monkeypatch):
    monkeypatch.setattr("lmcache_core.storage.build.STAGING", ByteSize(24 * frame_nbytes(PAGE)))
    manager = SyncManager(lambda: build(Config(tiers=TIERS), registry()))
    failures: list[BaseException] = []
    threads = [
        threading.Thread(target=work, args=(manager, seed, failures)) for seed in range(WORKERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    assert manager.flush()

    async def check():
        manager.manager.check()
        stock = manager.manager.pool.accounting()
        assert stock.reserved == stock.leased == stock.quarantined == stock.dirty == 0

    manager.call(check())
    left = manager.close()
    assert not left.errors
    assert not left.quarantined


def test_an_engine_that_deletes_hears_of_no_tier_that_is_away():
    """Seen when a damaged value was to be deleted everywhere: the request would have ended with an error."""

    async def away(keys, *, deadline=None):
        raise Unavailable("away")

    manager = SyncManager(lambda: build(Config(tiers=TIERS), registry()))
    try:
        manager.manager.delete = away
        assert manager.delete([key_of(1)]) == 0
    finally:
        manager.close()
