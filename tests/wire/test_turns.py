"""Nobody waits for what others ask for: long work is cut, and turns that are long all the same are counted."""

import socket
import threading
import time

import pytest
from lmcache_server.turns import Turns

from lmcache_core.identity import probe_digest
from lmcache_core.spi import Refusal
from lmcache_core.wire import records, replies
from lmcache_core.wire.codec import LENGTH, decode_reply, frame, to_runs
from tests.wire.daemons import PATIENCE, ROOM, Daemon, describe, key, store


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("d"), "--arena-mode", "shared-rw", size="0.25") as found:
        yield found


def turns(client):
    return describe(client)["turns"]


def keep(client, numbers):
    held = client.reserve([(key(number), 1 << 20) for number in numbers], None)
    good = [each for each in held if not isinstance(each, Refusal)]
    client.commit_batch(good, [bytes(16)] * len(good))


def storm(daemon, over, laps):
    """Evict, list and scrape as fast as one client can, in requests of which none takes a machine even a quarter of a turn."""
    client = daemon.client(timeout=PATIENCE)
    while not over.is_set():
        keep(client, [20_000 + 2 * len(laps), 20_001 + 2 * len(laps)])
        client.ask(replies.Values, lambda id: records.List(id, limit=32))
        client.ask(replies.Metered, records.Stats)
        laps.append(time.monotonic())
    client.close()


def test_a_turn_stays_short_while_a_storm_evicts_lists_and_scrapes(daemon):
    client = daemon.client(timeout=PATIENCE)
    for number in range(10_000, 10_256, 8):  # memory is full from the first lap on
        keep(client, range(number, number + 8))
    for at in range(0, 500, 100):
        store(client, *range(at, at + 100), nbytes=4096)
    before = turns(client)
    over, laps, asked, end = threading.Event(), [], 0, time.monotonic() + 3 * PATIENCE
    thread = threading.Thread(target=storm, args=(daemon, over, laps))
    thread.start()
    keys = [key(number) for number in range(16)]
    while (len(laps) < 60 or asked < 100) and thread.is_alive() and time.monotonic() < end:
        loaded = client.load(keys, None)
        assert len(loaded.leases) == 16
        client.release(loaded.leases)
        asked += 1
    over.set()
    thread.join()
    after = turns(client)
    assert len(laps) >= 60
    # A few are what evicting whole slabs of small values or the hypervisor may cost; a verb that holds
    # everybody up would be there once in every lap.
    assert after["busy"] - before["busy"] <= 5 + len(laps) / 10, (after, len(laps), asked)
    client.close()


def test_a_long_turn_is_counted_and_a_busy_one_told_apart():
    selector = Turns()
    selector.begin()
    selector.select(0)
    assert (selector.long, selector.busy) == (0, 0)
    time.sleep(0.005)
    selector.select(0)
    assert (selector.long, selector.busy) == (1, 0)
    begun = time.thread_time()
    while time.thread_time() < begun + 0.003:
        pass
    selector.select(0)
    assert (selector.long, selector.busy) == (2, 1)
    assert selector.slowest > 0.003
    selector.close()


def test_one_page_of_a_list_is_short_and_the_list_is_whole(daemon):
    client = daemon.client(timeout=PATIENCE)
    store(client, *range(3000, 3300), nbytes=4096)
    named, after = [], None
    while True:
        page = client.ask(replies.Values, lambda id: records.List(id, after=after, limit=10_000))
        assert len(page.keys) <= 200
        named += page.keys
        if (after := page.after) is None:
            break
    assert {key(number).text for number in range(3000, 3300)} <= {*named}
    assert len(named) == len({*named})
    client.close()


def test_a_client_that_sends_many_requests_at_once_does_not_hold_up_another(daemon):
    """Seen in LMCache#2915."""
    greedy, other = socket.socket(socket.AF_UNIX), daemon.client(timeout=PATIENCE)
    store(other, *range(4000, 4016), nbytes=4096)
    hello = records.Hello(1, records.VERSION, probe_digest(), 0)
    count = 3000  # of small requests: dozens come with one look at the socket, on a slow machine as well
    with greedy:
        greedy.settimeout(PATIENCE)
        greedy.connect(daemon.path)
        greedy.sendall(frame(hello))
        greedy.recv(1 << 16)
        runs = to_runs([key(number) for number in range(16)])
        asks = b"".join(frame(records.Find(at + 2, runs, 1.0)) for at in range(count))
        sender = threading.Thread(target=greedy.sendall, args=(asks,))
        before = turns(other)["busy"]
        sender.start()
        data = b""
        for at in range(count):
            while len(data) < 4 or len(data) < 4 + LENGTH.unpack_from(data)[0]:
                data += greedy.recv(1 << 20)
            (nbytes,) = LENGTH.unpack_from(data)
            assert decode_reply(data[4 : 4 + nbytes]).id == at + 2
            data = data[4 + nbytes :]
            if at % 100 == 0:
                loaded = other.load([key(number) for number in range(4000, 4016)], None)
                assert len(loaded.leases) == 16
                other.release(loaded.leases)
        sender.join()
        assert turns(other)["busy"] - before <= 5
    other.close()


def test_memory_that_is_not_touched_yet_holds_up_nobody(tmp_path):
    with Daemon(tmp_path, "--arena-mode", "shared-rw", size="0.5") as daemon:
        client = daemon.client(timeout=PATIENCE)
        held = []
        for at in range(0, 96, 2):
            held += client.reserve([(key(at + n), ROOM + (4 << 20)) for n in range(2)], None)
        assert not any(isinstance(each, Refusal) for each in held)
        assert turns(client)["busy"] <= 12, turns(client)  # of the 48 that would wait for it
        for each in held:
            client.abort(each)
        client.close()
