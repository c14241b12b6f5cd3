"""What an engine gets from a daemon, and what it gets when the daemon is slow, gone, or another one."""

import gc
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from lmcache_core.engine import CacheClient
from lmcache_core.spi import Closed, ConfigError, Refusal
from lmcache_core.storage.results import Reason
from lmcache_core.wire import records, replies
from lmcache_core.wire.client import DaemonClient
from lmcache_core.wire.codec import to_runs
from tests.wire.daemons import (
    ROOM,
    Daemon,
    check_leases,
    describe,
    fill,
    identity_holds,
    key,
    store,
    wait_for,
)  # fmt: skip


def test_daemon_client_is_a_cache_client(client):
    found: CacheClient = client
    assert found is client


def test_what_one_client_stores_another_reads_in_place(shared, client):
    assert store(client, 1, 2, 3) == [True] * 3
    other = shared.client()
    loaded = other.load([key(1), key(2), key(3), key(999)], None)
    assert loaded.reason is Reason.MISS
    check_leases(loaded.leases, [1, 2, 3])
    assert all(lease.view.readonly and lease.current for lease in loaded.leases)
    other.release(loaded.leases)
    other.close()


def test_lookup_tells_places_without_leasing(client):
    store(client, 10)
    found = client.lookup([key(10), key(11)])
    assert [place and place.tier for place in found.places] == ["cpu", None]
    assert describe(client)["memory"]["leased"] == 0


def test_second_writer_is_told_before_it_copies(client):
    store(client, 20)
    (answer,) = client.reserve([(key(20), ROOM + 100)], None)
    assert answer is Refusal.PRESENT
    (held,) = client.reserve([(key(21), ROOM + 100)], None)
    (again,) = client.reserve([(key(21), ROOM + 100)], None)
    assert again is Refusal.PENDING
    client.abort(held)


def test_abort_after_commit_does_nothing(client):
    (held,) = client.reserve([(key(30), ROOM + 4096)], None)
    assert client.commit_batch([held], [fill(held, 30)]) == [True]
    client.abort(held)
    assert client.lookup([key(30)]).leading == 1
    with pytest.raises(ValueError, match="has ended"):
        _ = held.view


def test_released_leases_come_back_whole_and_one_by_one(client):
    """Seen in LMCache#3770."""
    store(client, *range(40, 48))
    keys = [key(number) for number in range(40, 48)]
    loaded = client.load(keys, None)
    client.release(loaded.leases[2:])
    with pytest.raises(ValueError, match="has ended"):
        _ = loaded.leases[2].view
    check_leases(loaded.leases[:2], [40, 41])
    memory = wait_for(lambda: describe(client)["memory"])
    assert memory["leased"] == 2 * (64 << 10) + 2 * ROOM
    client.release(loaded.leases[:2])
    assert describe(client)["memory"]["leased"] == 0
    assert all(not each["leases"] for each in describe(client)["clients"])


def test_deleted_value_stays_readable_for_who_leased_it(client):
    store(client, 50)
    loaded = client.load([key(50)], None)
    assert client.delete([key(50)]) == 1
    assert client.load([key(50)], None).reason is Reason.MISS
    check_leases(loaded.leases, [50])
    client.release(loaded.leases)


def test_absent_daemon_is_a_miss_within_a_millisecond(tmp_path):
    """Seen in LMCache#1491."""
    client = DaemonClient(f"unix://{tmp_path}/nobody.sock")
    times = []
    for _ in range(50):
        begun = time.perf_counter()
        assert client.load([key(1)], None).leases == ()
        assert client.lookup([key(1)]).leading == 0
        assert client.reserve([(key(1), 10)], None) == [Refusal.UNWANTED]
        assert client.delete([key(1)]) == 0
        times.append((time.perf_counter() - begun) / 4)
    assert sorted(times)[25] < 0.001
    client.close()


def test_socket_of_another_kind_is_no_daemon(tmp_path, caplog):
    import socket

    with socket.socket(socket.AF_UNIX) as liar:
        liar.bind(f"{tmp_path}/liar.sock")
        liar.listen()

        def lie():
            with liar.accept()[0] as caller:
                caller.sendall(b"\xff" * 64)
                caller.recv(1)

        thread = threading.Thread(target=lie)
        thread.start()
        client = DaemonClient(f"unix://{tmp_path}/liar.sock", timeout=0.3)
        assert client.home is None
        assert client.load([key(1)], None).leases == ()
        client.close()
        thread.join()


def test_killed_daemon_is_a_miss_and_its_successor_is_found(tmp_path):
    """Seen in LMCache#5270, LMCache#5168."""
    with Daemon(tmp_path, "--arena-mode", "shared-rw") as daemon:
        client = daemon.client()
        store(client, 1, 2)
        loaded = client.load([key(1), key(2)], None)
        boot = client.home.boot
        daemon.kill()
        begun = time.perf_counter()
        assert client.load([key(1)], None).leases == ()
        assert time.perf_counter() - begun < 0.5  # it has a second
        check_leases(loaded.leases, [1, 2])  # the mapping outlives the daemon
        daemon.start()
        wait_for(lambda: client.home is not None and client.home.boot != boot, 5)
        assert store(client, 3) == [True]
        check_leases(loaded.leases, [1, 2])
        client.release(loaded.leases)
        assert describe(client)["memory"]["leased"] == 0
        client.close()


def test_memory_of_a_daemon_that_is_gone_does_not_wait_for_the_collector(tmp_path, monkeypatch):
    """Seen: a dozen dead daemons' pools mapped at once, each as large as the one that lived."""
    monkeypatch.setattr("lmcache_core.wire.connection._KEEP_S", 0.1)

    def mapped():
        return Path("/proc/self/maps").read_text().count("memfd:lmcache")

    with Daemon(tmp_path, "--arena-mode", "shared-rw") as daemon:
        client = daemon.client()
        before = mapped()
        gc.disable()
        try:
            for _ in range(3):
                boot = client.home.boot
                daemon.kill()
                daemon.start()
                wait_for(lambda: client.home is not None and client.home.boot != boot, 10)  # noqa: B023
            wait_for(lambda: mapped() == before, 5, "the end of the old mappings")
        finally:
            gc.enable()
        client.close()


def test_stopped_daemon_costs_no_call_more_than_its_deadline(tmp_path):
    """Seen in LMCache#4670."""
    with Daemon(tmp_path, "--arena-mode", "shared-rw") as daemon:
        client = daemon.client(timeout=20)
        assert store(client, 1) == [True]
        client.timeout = 0.2
        daemon.send(signal.SIGSTOP)
        spent = []
        end = time.monotonic() + 2
        while time.monotonic() < end:
            begun = time.monotonic()
            assert client.load([key(1)], None).leases == ()
            spent.append(time.monotonic() - begun)
            time.sleep(0.005)
        assert max(spent) < 1
        assert sum(spent) < 1.6  # after a wait it is left alone for a while
        daemon.send(signal.SIGCONT)
        client.timeout = 20
        loaded = wait_for(lambda: (found := client.load([key(1)], None)).leases and found)
        client.release(loaded.leases)
        watcher = daemon.client()  # the client may leave the daemon alone for a while yet
        wait_for(lambda: describe(watcher)["memory"]["leased"] == 0, 10, "the end of late leases")
        assert all(not each["leases"] for each in describe(watcher)["clients"])
        watcher.close()
        client.close()


def test_child_of_a_fork_starts_anew_and_leaves_its_parent_alone(client):
    store(client, 60)
    loaded = client.load([key(60)], None)
    pid = os.fork()
    if pid == 0:
        try:
            with pytest.raises(Closed):
                _ = loaded.leases[0].view
            good = not client.load([key(60)], None).leases or True
            client.connect()
            fresh = client.load([key(60)], None)
            check_leases(fresh.leases, [60])
            os._exit(0 if good else 1)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    check_leases(loaded.leases, [60])
    client.release(loaded.leases)
    assert client.lookup([key(60)]).leading == 1


def test_many_threads_share_one_client(client):
    store(client, *range(70, 90))
    keys = [key(number) for number in range(70, 90)]
    finished = []

    def work():
        for _ in range(50):
            loaded = client.load(keys, None)
            check_leases(loaded.leases[:3], [70, 71, 72])
            client.release(loaded.leases)
        finished.append(True)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(finished) == 4
    client.nudge()
    wait_for(lambda: describe(client)["memory"]["leased"] == 0)
    assert identity_holds(describe(client)["memory"])


def test_prefetch_says_when_it_is_ready(client):
    store(client, 95)
    done = threading.Event()
    runs = to_runs([key(95)])
    job = client.ask(replies.Count, lambda id: records.Prefetch(id, runs, 1.0)).count
    client.on_ready(job, lambda ready: done.set())
    assert done.wait(5)


def test_end_of_a_prefetch_that_is_heard_before_its_number_is_not_lost(client):
    """Seen in sglang#27366, vllm#25562."""
    client._notice(replies.Ready(7, 1, "complete"))
    heard = []
    client.on_ready(7, heard.append)
    assert [ready.job for ready in heard] == [7]
    over = client.prefetch([key(95)], 1.0)
    wait_for(over, 5)


def test_operators_verbs(client):
    store(client, 96, tags=["blue"])
    assert client.invalidate("blue") == 1
    store(client, 97, 98)
    listed = client.ask(replies.Values, lambda id: records.List(id, limit=10_000))
    assert {key(97).text, key(98).text} <= {*listed.keys}
    client.ask(replies.Done, lambda id: records.Freeze(id, True))
    assert client.reserve([(key(99), 100)], None) == [Refusal.UNWANTED]
    client.ask(replies.Done, lambda id: records.Freeze(id, False))
    client.ask(replies.Done, lambda id: records.Quota(id, "small", 1 << 20))
    assert store(client, 101, nbytes=2 << 20, tenant="small") == []
    client.ask(replies.Done, lambda id: records.Quota(id, "small", None))
    names = {sample.name for sample in client.ask(replies.Metered, records.Stats).samples}
    assert "lmcache_tier_hit_chunks_total" in names
    assert not client.flush().values
    assert client.ask(replies.Count, lambda id: records.Clear(id, 1.0)).count >= 2
    assert client.lookup([key(97)]).leading == 0


def test_commit_that_nobody_heard_gives_its_memory_back(shared):
    client = shared.client()
    (held,) = client.reserve([(key(90), ROOM + 4096)], None)
    identity = fill(held, 90)
    client._quiet_until = client.now() + 60  # as after a wait in vain: no call is made
    assert client.commit_batch([held], [identity]) == [False]
    client._quiet_until = 0.0
    wait_for(lambda: describe(client)["memory"]["reserved"] == 0, 5)
    client.close()


def test_a_configuration_error_is_no_answer_and_ends_no_helper(client, monkeypatch):
    """A file of authorities that was removed under a running engine is one, when it connects again."""
    store(client, 70)
    loaded = client.load([key(70)], None).leases

    def refuse(*what, **how):
        raise ConfigError("the file cannot be read")

    monkeypatch.setattr(client, "borrow", refuse)
    assert client.prefetch([key(1)], 1.0)() is True
    assert client.dispatch("e", loaded, 1) is None
    assert client.usage() == []
    client.release(loaded)
    client.help(0.1)
    monkeypatch.undo()
    client.help(0.1)
    wait_for(lambda: describe(client)["memory"]["leased"] == 0)
