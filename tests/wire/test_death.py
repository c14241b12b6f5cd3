"""Clients that die, stop or fork in every state: memory comes back by proof, never by time."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmcache_core.spi import Refusal
from lmcache_core.wire import records, replies
from tests.wire.daemons import (
    ROOM,
    Daemon,
    Process,
    check_leases,
    describe,
    identity_holds,
    key,
    store,
    wait_for,
)  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]


class Client(Process):
    def __init__(self, daemon, before=(), where=()):
        where = where or (f"unix://{daemon.path}",)
        super().__init__(
            [*before, sys.executable, "-m", "tests.wire.hostile", *where],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip

    def do(self, order):
        self.child.stdin.write(f"{order}\n")
        self.child.stdin.flush()
        return self.child.stdout.readline().strip()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.kill()
        self.child.stdin.close()
        self.child.stdout.close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("d"), "--arena-mode", "shared-rw", size="0.008") as found:
        yield found


@pytest.fixture
def client(daemon):
    found = daemon.client()
    store(found, *range(8))
    yield found
    found.close()


@pytest.mark.parametrize(
    "orders",
    [["lookup 1 2"], ["reserve 100 101"], ["reserve 102", "write 5"], ["lease 1 2 3"],
     ["lease 1", "reserve 103", "lease 2"]],
    ids=["lookup", "reserved", "writing", "leased", "all"],
)  # fmt: skip
def test_killed_client_gives_everything_back_within_a_second(daemon, client, orders):
    """Seen in vllm#44100, LMCache#4287, LMCache#5265.

    Seen in Mooncake#1078.
    """
    with Client(daemon) as victim:
        for order in orders:
            victim.do(order)
        victim.kill()
        begun = time.monotonic()

        def settled():
            memory = describe(client)["memory"]
            return memory["reserved"] == memory["leased"] == memory["quarantined"] == 0 and memory

        memory = wait_for(settled, 5)
        assert time.monotonic() - begun < 1
        assert identity_holds(memory)
        assert len(describe(client)["clients"]) == 1


def evicted(client):
    samples = client.ask(replies.Metered, records.Stats).samples
    return sum(each.value for each in samples if each.name == "lmcache_tier_evicted_chunks_total")


def test_stopped_writers_memory_is_never_used_again(daemon, client):
    """Stopped past every deadline it knows, while a hundred values are evicted around what it writes into."""
    with Client(daemon) as writer:
        writer.do("reserve 200 201")
        assert writer.do("write 7") == "writing"
        writer.send(signal.SIGSTOP)
        stopped, numbers = time.monotonic(), [*range(300, 400)]
        store(client, *numbers)  # as much as memory holds
        before = evicted(client)
        while evicted(client) - before < 100:
            numbers.append(numbers[-1] + 1)
            assert store(client, numbers[-1]) == [True]
        time.sleep(max(0.0, stopped + 1.2 - time.monotonic()))  # it gives a call a second
        assert describe(client)["memory"]["reserved"] == 2 * (65536 + ROOM)
        there = [n for n in numbers if client.lookup([key(n)]).leading]
        assert len(there) > 50
        writer.send(signal.SIGCONT)
        time.sleep(0.05)  # it writes on
        loaded = client.load([key(n) for n in there], None)
        check_leases(loaded.leases, there)
        client.release(loaded.leases)


def test_stopped_reader_keeps_what_it_leased(daemon, client):
    with Client(daemon) as reader:
        reader.do("lease 1")
        reader.send(signal.SIGSTOP)
        assert client.delete([key(1)]) == 1
        for number in range(400, 500):
            store(client, number)
        assert describe(client)["memory"]["quarantined"] == 65536 + ROOM
        reader.kill()
        wait_for(lambda: describe(client)["memory"]["quarantined"] == 0)


def test_death_is_noticed_although_a_helper_keeps_the_socket_open(daemon, client):
    with Client(daemon) as victim:
        victim.do("reserve 500")
        helper = int(victim.do("fork"))
        try:
            victim.kill()
            wait_for(lambda: describe(client)["memory"]["reserved"] == 0)
            assert os.path.exists(f"/proc/{helper}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(helper, signal.SIGKILL)


def test_lost_connection_is_not_death(daemon, client):
    """Service ends, memory does not; the same process takes its rights up again.

    Seen in LMCache#3206, LMCache#4715.
    """
    (held,) = client.reserve([(key(600), ROOM + 65536)], None)
    loaded = client.load([key(2)], None)
    home = client.home
    client._lost(home)
    watcher = daemon.client()
    memory = describe(watcher)["memory"]
    assert memory["leased"] or memory["quarantined"] or memory["reserved"]
    wait_for(lambda: client.home is not None)
    assert client.home is home
    check_leases(loaded.leases, [2])
    client.release(loaded.leases)
    client.abort(held)
    wait_for(lambda: not describe(client)["memory"]["quarantined"])
    memory = describe(client)["memory"]
    assert memory["leased"] == memory["reserved"] == 0
    watcher.close()


def test_reservation_that_outlived_its_connection_does_not_commit(daemon, client):
    """Seen in vllm#46283."""
    (held,) = client.reserve([(key(601), ROOM + 65536)], None)
    client._lost(client.home)
    wait_for(lambda: client.home is not None)
    other = daemon.client()
    assert store(other, 601) == [True]  # the key was free again
    assert client.commit_batch([held], [b"x" * 16]) == [False]
    loaded = other.load([key(601)], None)
    check_leases(loaded.leases, [601])
    other.release(loaded.leases)
    other.close()


def test_full_memory_refuses_and_says_so(daemon, client):
    keep = [client.load([key(n)], None) for n in range(8)]
    answers = client.reserve([(key(n), ROOM + 65536) for n in range(700, 900)], None)
    assert answers[-1] is Refusal.FULL
    for answer in answers:
        if not isinstance(answer, Refusal):
            client.abort(answer)
    for each in keep:
        client.release(each.leases)
    assert store(client, 701) == [True]


def test_daemon_is_unharmed_by_it_all(daemon):
    text = daemon.log.read_text()
    assert "Traceback" not in text, text
