"""Prefetches of one client: as much memory as is set aside for them, and so many at once."""

import asyncio
from types import SimpleNamespace

import pytest
from lmcache_server.admin import MOST_JOBS, prefetch
from lmcache_server.slices import MANY

from lmcache_core.storage.results import Loaded, Reason
from lmcache_core.wire import records
from lmcache_core.wire.codec import to_runs
from tests.wire.daemons import key

NBYTES = 4096


class Manager:
    """Brings up whatever it is asked for."""

    def __init__(self, capacity, there=()):
        self.pool = SimpleNamespace(capacity=capacity)
        self.config = SimpleNamespace(manager=SimpleNamespace(prefetch=0.25))
        self.there = {*there}
        self.leased = 0

    def lookup_resident(self, keys):
        return [NBYTES if each in self.there else None for each in keys]

    async def prefetch(self, keys, owner, **how):
        await asyncio.sleep(0)
        self.leased += len(keys)
        lease = SimpleNamespace(extent=SimpleNamespace(nbytes=NBYTES))
        return Loaded((lease,) * len(keys), Reason.COMPLETE)

    def release(self, leases):
        self.leased -= len(leases)


def ask(manager, counts, *, jobs=0):
    """Prefetch so many values in each of several requests; the notices, and the session after them."""
    said, tasks, session = [], [], SimpleNamespace(jobs=jobs)

    async def play():
        daemon = SimpleNamespace(
            manager=manager, now=lambda: 0.0, sessions=SimpleNamespace(number=lambda: 7),
            work=lambda work: tasks.append(asyncio.ensure_future(work)),
        )  # fmt: skip
        link = SimpleNamespace(closed=False, reply=said.append)
        for count in counts:
            record = records.Prefetch(1, to_runs([key(number) for number in range(count)]), 1.0)
            assert prefetch(daemon, link, session, record).count == 7
        await asyncio.gather(*tasks)
        for _ in range(1000):  # a part after each turn
            await asyncio.sleep(0)
        assert not manager.leased

    asyncio.run(asyncio.wait_for(play(), 10))
    return [(each.count, each.reason) for each in said], session


def test_what_is_brought_up_in_slices_stays_within_the_share_of_memory():
    room = 4 * MANY * NBYTES // 4
    assert ask(Manager(4 * room), [MANY])[0] == [(MANY, "complete")]
    assert ask(Manager(4 * room), [10 * MANY])[0] == [(2 * MANY, "full")]


def test_what_is_there_already_takes_nothing_of_it():
    manager = Manager(4 * MANY * NBYTES, there=[key(number) for number in range(9 * MANY)])
    assert ask(manager, [10 * MANY])[0] == [(10 * MANY, "complete")]


@pytest.mark.parametrize("jobs", [0, 3])
def test_more_at_once_than_one_client_may_have_end_as_full(jobs):
    said, session = ask(Manager(1 << 40), [2 * MANY] * MOST_JOBS, jobs=jobs)
    assert sorted(said) == sorted(
        [(2 * MANY, "complete")] * (MOST_JOBS - jobs) + [(0, "full")] * jobs
    )
    assert session.jobs == jobs
