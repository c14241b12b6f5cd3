"""The end of what a client held by the thousand: in slices, and every byte is accounted for between two of them."""

import asyncio
from itertools import pairwise
from types import SimpleNamespace

import pytest
from lmcache_server import verbs
from lmcache_server.session import Sessions
from lmcache_server.slices import MANY, MANY_WRITTEN

from lmcache_core.testing.contexts import simulated_context
from lmcache_core.testing.worlds import PAGE, key_of, make_manager
from lmcache_core.wire import records
from tests.wire.test_sessions_model import Clock, Process

COUNT = 1500


class Link:
    def __init__(self, sessions, session):
        self.sessions, self.session = sessions, session
        session.connections.add(self)

    def close(self):
        self.sessions.closed(self.session, self)


@pytest.fixture
def manager():
    return make_manager(
        capacity=4 * COUNT * PAGE, context=simulated_context(tier="cpu", clock=Clock())
    )


@pytest.fixture
def sessions(manager):
    return Sessions(manager, lambda session: None)


@pytest.fixture
def client(manager, sessions):
    """A session that holds thousands of reservations, and as many leases, in batches and one by one."""
    session = sessions.open("client", Process(), 7)
    kept = [key_of(number) for number in range(COUNT)]
    manager.commit_batch(manager.reserve([(key, PAGE) for key in kept], "x"), [bytes(16)] * COUNT)
    for at in range(0, 1000, 500):
        session.leases[sessions.number()] = manager.lease(kept[at : at + 500], session)
    for key in kept[1000:]:
        session.leases[sessions.number()] = manager.lease([key], session)
    wants = [(key_of(number), PAGE) for number in range(COUNT, 2 * COUNT)]
    for held in manager.reserve(wants, session):
        session.reservations[sessions.number()] = held
    session.link = Link(sessions, session)
    return session


def books(manager):
    """(bytes reserved, leases) now; they add up, whenever that is."""
    manager.pool.check()
    stock = manager.pool.accounting()
    return stock.reserved // PAGE, stock.leased // PAGE, stock.quarantined // PAGE


async def turns(manager, until):
    """What the books say after each turn of the loop."""
    found = [books(manager)]
    while found[-1] != until:
        await asyncio.sleep(0)
        found.append(books(manager))
        assert len(found) < 100
    return found


def test_killed_client_gives_thousands_back_in_slices(manager, sessions, client):
    async def work():
        before = books(manager)
        client.process.dead = True
        sessions.gone(client)
        assert client.token not in sessions.by_token and client.empty
        return [before, *await turns(manager, (0, 0, 0))]

    found = asyncio.run(work())
    assert found[0] == (COUNT, COUNT, 0)
    held = [reserved + quarantined for reserved, _, quarantined in found]
    for before, after, (_, leased, _), (_, left, _) in zip(
        held, held[1:], found, found[1:], strict=False
    ):
        assert (
            before - after <= 3 * MANY_WRITTEN
        )  # by the proof, and what the client had begun itself
        assert leased - left <= MANY + 500
    assert client not in manager.pool.owners


def test_lost_connection_quarantines_thousands_in_slices(manager, sessions, client):
    async def work():
        client.link.close()
        assert 0 < books(manager)[0] < COUNT
        back = Link(sessions, client)  # before all is in quarantine
        good = [
            manager.commit_batch([each], [bytes(16)])[0] for each in client.reservations.values()
        ]
        assert {*good} == {True, False}, "what nobody had come to was still its writer's"
        await turns(manager, (0, COUNT, 0))
        back.close()
        await asyncio.sleep(0)
        assert books(manager) == (0, COUNT, 0)

    asyncio.run(work())
    assert client.token in sessions.by_token


def test_thousands_are_aborted_in_slices_and_are_nobodys_at_once(manager, sessions, client):
    async def work():
        grants = [*client.reservations]
        sessions.abort(client, grants)
        assert not client.reservations
        assert 0 < books(manager)[0] <= COUNT - MANY_WRITTEN
        client.process.dead = True  # in the middle
        sessions.gone(client)
        await turns(manager, (0, 0, 0))

    asyncio.run(work())


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "cut"])
def test_thousands_that_came_over_a_connection_become_visible_in_slices(manager, client, whole):
    """Leaves first; or they are given back, when their bytes never came."""
    grants, keys = [*client.reservations], [held.key for held in client.reservations.values()]
    replies, taken, filled = [], [], []
    link = SimpleNamespace(
        local=True,
        reply=replies.append,
        receive_values=lambda into, done: (taken.append(next(into)), filled.append(done)),
    )

    async def work():
        daemon = SimpleNamespace(
            manager=manager, tls=None, work=asyncio.get_running_loop().create_task
        )
        ask = records.Commit(1, grants, bytes(16) * COUNT, None, COUNT * PAGE)
        verbs.commit(daemon, link, client, ask)
        assert not client.reservations
        assert [view.nbytes for view in taken] == [PAGE], "the others are asked for one by one"
        filled[0](whole)
        seen = [manager.lookup_resident(keys)]
        while books(manager)[0]:
            await asyncio.sleep(0)
            seen.append(manager.lookup_resident(keys))
        await asyncio.sleep(0)
        return seen

    counts = [COUNT - each.count(None) for each in asyncio.run(work())]
    assert counts[-1] == (COUNT if whole else 0)
    assert all(after - before <= MANY_WRITTEN for before, after in pairwise(counts))
    assert [reply.good for reply in replies] == ([[True] * COUNT] if whole else [])
