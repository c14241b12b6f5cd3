"""Sessions of a daemon against a model of them: whatever connects, ends, dies and comes back, rights stay with who has them.

Once as it is, and once where one turn of the loop gives back one right, so that everything happens between two of them.
"""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from lmcache_server import session, slices
from lmcache_server.session import Sessions

from lmcache_core.memory.leases import Held
from lmcache_core.testing.contexts import simulated_context
from lmcache_core.testing.worlds import PAGE, fill, frame_nbytes, key_of, make_manager, verify_lease

NUMBERS = st.integers(0, 9)


class Clock:
    def now(self):
        return 0.0

    def wall(self):
        return 1e9


class Process:
    """A client's process: readable when it has ended."""

    def __init__(self):
        self.dead = False

    def gone(self):
        return self.dead


class Link:
    def __init__(self, client):
        self.client = client

    def close(self):
        self.client.links.discard(self)
        self.client.machine.sessions.closed(self.client.session, self)


class Client:
    """What a process knows: its rights, by the numbers it was told, as long as it has not let go of them."""

    def __init__(self, machine, name):
        self.machine, self.process = machine, Process()
        self.session = machine.sessions.open(name, self.process, 7)
        self.links = set()
        self.leases, self.reservations = {}, {}
        self.connect()

    def connect(self):
        self.links.add(link := Link(self))
        self.session.connections.add(link)


class Turns:
    """What the loop still has to do, in place of the loop."""

    def __init__(self):
        self.left = []

    def call_soon(self, call, *what):
        self.left.append((call, *what))

    def turn(self):
        call, *what = self.left.pop(0)
        call(*what)


class Machine(RuleBasedStateMachine):
    sliced = False

    def __init__(self):
        super().__init__()
        self.turns, self.patches = Turns(), ExitStack()
        self.patches.enter_context(
            patch.object(slices.asyncio, "get_running_loop", lambda: self.turns)
        )
        if self.sliced:
            self.patches.enter_context(patch.multiple(session, MANY=1, MANY_WRITTEN=1))
        context = simulated_context(tier="cpu", clock=Clock())
        self.manager = make_manager(capacity=24 * 2 * PAGE, context=context)
        self.sessions = Sessions(self.manager, lambda session: self.over.append(session))
        self.over = []
        self.clients = []

    def pick(self, data, *, connected=True):
        there = [each for each in self.clients if bool(each.links) == connected]
        return data.draw(st.sampled_from(there), "client") if there else None

    @precondition(lambda self: len(self.clients) < 4)
    @rule()
    def begin(self):
        self.clients.append(Client(self, f"client {len(self.clients)}"))

    @rule(data=st.data(), numbers=st.lists(NUMBERS, min_size=1, max_size=4, unique=True))
    def reserve(self, data, numbers):
        if client := self.pick(data):
            wants = [(key_of(number), frame_nbytes(PAGE)) for number in numbers]
            for held in self.manager.reserve(wants, client.session):
                if isinstance(held, Held):
                    grant = self.sessions.number()
                    client.session.reservations[grant] = client.reservations[grant] = held

    @rule(data=st.data())
    def commit(self, data):
        client = self.pick(data)
        if client and client.reservations:
            grant = data.draw(st.sampled_from(sorted(client.reservations)), "grant")
            held = client.reservations.pop(grant)
            found = client.session.reservations.pop(grant, None)
            assert found is held, "a reservation was taken from a client that still has it"
            self.manager.commit_batch([held], [fill(held)])

    @rule(data=st.data(), numbers=st.lists(NUMBERS, min_size=1, max_size=4, unique=True))
    def lease(self, data, numbers):
        if client := self.pick(data):
            leases = self.manager.lease([key_of(number) for number in numbers], client.session)
            if leases.left:
                grant = self.sessions.number()
                client.session.leases[grant] = client.leases[grant] = leases

    @rule(data=st.data(), twice=st.booleans())
    def release(self, data, twice):
        client = self.pick(data)
        if client and client.leases:
            grant = data.draw(st.sampled_from(sorted(client.leases)), "grant")
            del client.leases[grant]
            for _ in range(1 + twice):
                self.sessions.release(client.session, [grant])

    @rule(data=st.data(), twice=st.booleans())
    def abort(self, data, twice):
        client = self.pick(data)
        if client and client.reservations:
            grant = data.draw(st.sampled_from(sorted(client.reservations)), "grant")
            del client.reservations[grant]
            for _ in range(1 + twice):
                self.sessions.abort(client.session, [grant])

    @rule(data=st.data(), unknown=st.integers(0, 99))
    def nonsense(self, data, unknown):
        if client := self.pick(data):
            self.sessions.release(client.session, [unknown], [(unknown, [0, 5])])
            self.sessions.abort(client.session, [unknown])

    @rule(data=st.data())
    def connect_again(self, data):
        if client := self.pick(data):
            client.connect()

    @rule(data=st.data())
    def cut(self, data):
        """One connection is lost; with the last one service ends, and nothing else."""
        if client := self.pick(data):
            data.draw(st.sampled_from(sorted(client.links, key=id)), "link").close()

    @rule(data=st.data(), forget=st.booleans())
    def rejoin(self, data, forget):
        """A process comes back and says what it still uses; what it lost on the way is not among it."""
        client = self.pick(data, connected=False)
        if client is None:
            return
        if forget:
            client.leases = dict(list(client.leases.items())[1:])
            client.reservations = dict(list(client.reservations.items())[1:])
        session = self.sessions.find(client.session.token, 7)
        if session is None:
            assert not client.leases and not client.reservations
            client.session = self.sessions.open("again", client.process, 7)
        else:
            before = set(session.leases)
            held = {*client.leases, *client.reservations}
            over = self.sessions.reclaim(session, held)
            assert set(over) == before - held
            if session.token not in self.sessions.by_token:
                client.session = self.sessions.open("again", client.process, 7)
        client.connect()

    @rule(data=st.data())
    def die(self, data):
        if self.clients:
            client = data.draw(st.sampled_from(self.clients), "client")
            self.clients.remove(client)
            client.process.dead = True
            if client.session.token in self.sessions.by_token:
                self.sessions.gone(client.session)
            assert self.turns.left or client.session not in self.manager.pool.owners

    @precondition(lambda self: self.turns.left)
    @rule()
    def turn(self):
        self.turns.turn()

    @rule(numbers=st.lists(NUMBERS, max_size=4))
    def drop(self, numbers):
        self.manager.pool.drop([key_of(number) for number in numbers])

    @invariant()
    def books_are_true(self):
        self.manager.pool.check()

    @invariant()
    def what_a_living_process_leased_is_its_value(self):
        for client in self.clients:
            for leases in client.leases.values():
                for lease in leases:
                    if lease is not None:
                        verify_lease(lease)

    @invariant()
    def nothing_is_held_for_nobody(self):
        living = {each.session for each in self.clients}
        assert self.turns.left or set(self.manager.pool.owners) <= living
        assert set(self.sessions.by_token.values()) <= living

    def teardown(self):
        for client in self.clients:
            client.process.dead = True
            if client.session.token in self.sessions.by_token:
                self.sessions.gone(client.session)
        while self.turns.left:
            self.turns.turn()
            self.manager.pool.check()
        self.patches.close()
        stock = self.manager.pool.accounting()
        assert (stock.reserved, stock.quarantined, stock.leased) == (0, 0, 0)
        assert not self.sessions.by_token


class Sliced(Machine):
    sliced = True


TestSessions, TestSlicedSessions = Machine.TestCase, Sliced.TestCase
for each in (TestSessions, TestSlicedSessions):
    each.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
