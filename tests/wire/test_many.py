"""Requests that name thousands of values: answered in slices, whole all the same, and nothing is left of half of one."""

import socket
import threading

import pytest

from lmcache_core.identity import probe_digest
from lmcache_core.spi import Refusal
from lmcache_core.storage.results import Reason
from lmcache_core.wire import records, replies
from lmcache_core.wire.codec import LENGTH, decode_reply, frame, to_runs
from tests.wire.daemons import Daemon, describe, identity_holds, key, wait_for
from tests.wire.test_engines import WHOLE, half, register

COUNT = 3000
NBYTES = 4096


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("d"), "--arena-mode", "shared-rw", size="0.0625") as found:
        yield found
        assert "Traceback" not in found.log.read_text()


@pytest.fixture
def client(daemon):
    found = daemon.client(timeout=20)
    found.delete([key(number) for number in range(30_000)])
    yield found
    found.close()


def keep(client, numbers):
    held = client.reserve([(key(number), NBYTES) for number in numbers], None)
    good = [each for each in held if not isinstance(each, Refusal)]
    return held, client.commit_batch(good, [each.key.digest[-16:] for each in good])


def memory(client):
    return describe(client)["memory"]


def settled(client):
    found = memory(client)
    return found["leased"] == found["reserved"] == found["quarantined"] == 0 and found


def test_many_values_are_answered_as_few_are(client):
    assert keep(client, range(COUNT))[1] == [True] * COUNT
    asked = [key(number) for number in range(COUNT + 1000)]
    assert client.lookup(asked).leading == COUNT
    assert [place is not None for place in client.lookup(asked[::-1]).places] == (
        [False] * 1000 + [True] * COUNT
    )
    loaded = client.load(asked, None)
    assert (len(loaded.leases), loaded.reason) == (COUNT, Reason.MISS)
    assert len({(each.extent.segment, each.extent.base) for each in loaded.leases}) == COUNT
    for at in (0, 511, 512, COUNT - 1):
        assert loaded.leases[at].identity == key(at).digest[-16:]
    client.release(loaded.leases[500:600])
    client.ask(replies.Done, records.Ping)
    assert memory(client)["leased"] == (COUNT - 100) * NBYTES
    client.release(loaded.leases)
    assert identity_holds(wait_for(lambda: settled(client)))
    answers, _ = keep(client, range(COUNT + 1000))
    assert answers[:COUNT] == [Refusal.PRESENT] * COUNT
    assert not any(isinstance(each, Refusal) for each in answers[COUNT:])
    assert client.delete(asked) == COUNT + 1000


def test_nothing_later_is_granted_after_memory_is_full(client):
    keep(client, range(100))
    capacity = memory(client)["capacity"] // NBYTES
    answers = client.reserve([(key(n), NBYTES) for n in range(100, capacity + 2000)], None)
    first = answers.index(Refusal.FULL)
    assert first >= capacity - 100
    assert {*answers[first:]} == {Refusal.FULL}
    for each in answers[:first]:
        client.abort(each)
    client.ask(replies.Done, records.Ping)
    assert identity_holds(wait_for(lambda: settled(client)))


def test_a_deadline_in_the_middle_ends_with_what_is_there(client):
    keep(client, range(COUNT))
    loaded = client.load([key(number) for number in range(COUNT)], None, seconds=0.0)
    assert loaded.reason is Reason.DEADLINE
    assert 0 < len(loaded.leases) < COUNT
    client.release(loaded.leases)
    wait_for(lambda: settled(client))


def test_the_root_of_a_long_prefix_outlives_its_leaves(client):
    capacity = memory(client)["capacity"] // NBYTES
    keep(client, range(COUNT))
    client.release(client.load([key(number) for number in range(COUNT)], None).leases)
    for at in range(10_000, 10_000 + capacity - COUNT // 2, 1000):
        keep(client, range(at, min(at + 1000, 10_000 + capacity - COUNT // 2)))
    there = client.lookup([key(number) for number in range(COUNT)])
    left = sum(place is not None for place in there.places)
    assert 0 < there.leading == left < COUNT


def greeted(daemon):
    found = socket.socket(socket.AF_UNIX)
    found.connect(daemon.path)
    found.sendall(frame(records.Hello(1, records.VERSION, probe_digest(), 0)))
    found.recv(1 << 16)
    return found


@pytest.fixture
def ranks(daemon):
    found = [daemon.client(timeout=20) for _ in range(2)]
    for rank, each in enumerate(found):
        register(each, rank, engine="many")
    yield found
    for each in found:
        each.close()


def test_ranks_fill_hundreds_of_chunks_in_one_call(client, ranks):
    numbers = range(20_000, 20_300)
    wants = [(key(number), WHOLE) for number in numbers]
    held = [each.reserve(wants, None, engine="many", turn=1) for each in ranks]
    ranks[1].abort(held[1][150])
    ranks[1].flush()
    expected = [number != 20_150 for number in numbers]
    for rank, each in enumerate(ranks):
        filled = [at for at in range(300) if (rank, at) != (1, 150)]
        mine = [held[rank][at] for at in filled]
        good = each.commit_parts(mine, [half(each, one, rank) for one in mine])
        assert good == [expected[at] for at in filled]
    there = client.lookup([key(number) for number in numbers])
    assert [place is not None for place in there.places] == expected
    assert identity_holds(wait_for(lambda: settled(client)))


def test_ranks_hold_what_was_dispatched_to_them_however_much(client, ranks):
    keep(client, range(COUNT))
    asked = [key(number) for number in range(COUNT)]
    leases = client.load(asked, None).leases
    client.release(leases[700:800])
    client.ask(replies.Done, records.Ping)
    handle = client.dispatch("many", leases, 1)
    adopted = [each.adopt(handle) for each in ranks]
    client.ask(replies.Done, records.Ping)
    assert client.delete(asked) == COUNT
    assert memory(client)["quarantined"] == (COUNT - 100) * NBYTES
    for each, mine in zip(ranks, adopted, strict=True):
        assert all(mine[at].current for at in (0, 511, 512, COUNT - 1))
        assert memory(client)["quarantined"] == (COUNT - 100) * NBYTES
        each.release(mine)
        each.flush()
    assert identity_holds(wait_for(lambda: settled(client)))


def test_many_values_are_pinned_and_unpinned(client):
    keep(client, range(COUNT))
    runs = to_runs([key(number) for number in range(COUNT + 1000)])
    pinned = client.ask(replies.Count, lambda id: records.Pin(id, runs, 10.0, 60.0))
    assert (pinned.count, pinned.nbytes) == (COUNT, COUNT * NBYTES)
    unpinned = client.ask(
        replies.Count, lambda id: records.Pin(id, to_runs([key(0), key(2000)]), 10.0, 0.0)
    )
    assert (unpinned.count, unpinned.nbytes) == (2, (COUNT - 2) * NBYTES)
    rest = client.ask(replies.Count, lambda id: records.Pin(id, [], 10.0, 0.0))
    assert (rest.count, rest.nbytes) == (COUNT - 2, 0)
    assert identity_holds(wait_for(lambda: settled(client)))


def test_many_values_are_prefetched_and_nothing_stays_leased(client):
    keep(client, range(COUNT))
    ready = []
    runs = to_runs([key(number) for number in range(COUNT + 1000)])
    job = client.ask(replies.Count, lambda id: records.Prefetch(id, runs, 10.0)).count
    client.on_ready(job, ready.append)
    wait_for(lambda: client.poll() or ready)
    assert (ready[0].count, ready[0].reason) == (COUNT, "miss")
    assert identity_holds(wait_for(lambda: settled(client)))


def test_others_are_answered_between_two_slices(daemon, client):
    keep(client, range(COUNT))
    with greeted(daemon) as greedy:
        runs = to_runs([key(number) for number in range(COUNT)] * 20)
        answered = threading.Event()

        def ask():
            greedy.sendall(frame(records.Find(2, runs, 20.0)))
            (nbytes,) = LENGTH.unpack(greedy.recv(4, socket.MSG_WAITALL))
            assert len(decode_reply(greedy.recv(nbytes, socket.MSG_WAITALL)).where) == 20 * COUNT
            answered.set()

        thread = threading.Thread(target=ask)
        thread.start()
        between = 0
        while not answered.is_set():
            client.ask(replies.Done, records.Ping)
            between += 1
        thread.join()
    assert between > 10


@pytest.mark.parametrize("verb", ["load", "reserve"])
def test_who_goes_away_in_the_middle_leaves_nothing(daemon, client, verb):
    keep(client, range(COUNT))
    if verb == "load":
        runs = to_runs([key(number) for number in range(COUNT)] * 20)
        record = records.Load(2, runs, 20.0)
    else:
        runs = to_runs([key(number) for number in range(COUNT, 4 * COUNT)])
        sizes = NBYTES.to_bytes(8, "little") * (3 * COUNT)
        record = records.Reserve(2, runs, sizes)
    with greeted(daemon) as gone:
        gone.sendall(frame(record))
        wait_for(lambda: memory(client)["leased"] or memory(client)["reserved"])
    assert identity_holds(wait_for(lambda: settled(client)))
