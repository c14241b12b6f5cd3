"""What the cache does not do to its node: names left behind, work while idle, calls to the world."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from lmcache_core.wire import records, replies
from tests.wire.daemons import Daemon, free_port, key, store

ROOT = Path(__file__).resolve().parents[2]


def names():
    return {name for name in os.listdir("/dev/shm") if "lmcache" in name or "psm" in name}


def test_no_name_of_shared_memory_is_left_however_a_daemon_ends(tmp_path):
    """Seen in LMCache#4197: the area of shared memory fills up with the pools of dead servers."""
    before = names()
    daemon = Daemon(tmp_path, "--arena-mode", "shared-rw")
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
        client = daemon.client()
        assert store(client, 1, 2) == [True, True]
        assert names() == before
        client.close()
        daemon.send(number)
        daemon.child.wait(20)
        assert names() == before
        daemon.start()
    daemon.kill()
    assert names() == before


def spent(pid):
    """Seconds of processor time a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


IDLE = """
import sys, time
from lmcache_core.wire import records, replies
from lmcache_core.wire.client import DaemonClient
client = DaemonClient("unix://" + sys.argv[1])
client.ask(replies.Document, records.Describe)
time.sleep(0.3)
before = time.process_time()
print("idle", flush=True)
sys.stdin.readline()
print(time.process_time() - before, flush=True)
"""


def test_an_idle_client_and_an_idle_daemon_use_no_processor(tmp_path):
    """Seen in sglang#26693: polling took up to 30 % of the scheduler's thread."""
    with Daemon(tmp_path) as daemon:
        child = subprocess.Popen(
            [sys.executable, "-c", IDLE, daemon.path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        with child:
            assert child.stdout.readline() == "idle\n"
            before, begun = spent(daemon.pid), time.monotonic()
            threading.Event().wait(1.5)  # what is idle has no event to wait for
            used = spent(daemon.pid) - before
            print(file=child.stdin, flush=True)
            client = float(child.stdout.readline())
            seconds = time.monotonic() - begun
    assert used < 0.05 * seconds
    assert client < 0.02 * seconds


def test_a_load_of_a_thousand_values_takes_no_more_for_each_than_a_small_one(tmp_path):
    """Seen in LMCache#4759: small loads worked, large ones hung until a watchdog ended the engine."""
    with Daemon(tmp_path, "--arena-mode", "shared-rw", size="0.0625") as daemon:
        client = daemon.client()
        for at in range(0, 1000, 100):
            store(client, *range(at, at + 100), nbytes=4096)
        each = {}
        for count in (10, 100, 1000):
            taken = []
            for _ in range(3):
                begun = time.perf_counter()
                leases = client.load([key(number) for number in range(count)], None).leases
                taken.append((time.perf_counter() - begun) / count)
                assert len(leases) == count
                client.release(leases)
            each[count] = min(taken)
        assert each[1000] < 4 * each[10], each
        client.close()


def test_clearing_many_values_holds_up_no_reader(tmp_path):
    """Seen in LMCache#2743: files were deleted one by one under the lock everybody needs."""
    with Daemon(
        tmp_path,
        "--arena-mode",
        "shared-rw",
        "--l2-disk-path",
        str(tmp_path / "disk"),
        "--l2-disk-size-gb",
        "0.1",
    ) as daemon:
        client, other = daemon.client(), daemon.client()
        for at in range(0, 2000, 100):
            store(client, *range(at, at + 100), nbytes=4096)
        longest, done = 0.0, threading.Event()

        def clear():
            try:
                other.ask(replies.Count, lambda id: records.Clear(id, 20.0))
            finally:  # what it raises must not leave the reader below without an end
                done.set()

        thread = threading.Thread(target=clear)
        thread.start()
        while not done.is_set():
            begun = time.perf_counter()
            client.release(client.load([key(1)], None).leases)
            longest = max(longest, time.perf_counter() - begun)
        thread.join()
        assert longest < 0.5
        assert len(client.load([key(number) for number in range(8)], None).leases) == 0
        client.close()
        other.close()


WATCH = """
import os, sys
def heard(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"):
        with open({log!r}, "a") as log:
            print(event, arguments[1:] if event.startswith("socket.c") else arguments, file=log)
sys.addaudithook(heard)
"""


def test_nothing_is_sent_out_that_is_not_configured(tmp_path):
    """Seen in LMCache#2269: usage data went to an outside address by default."""
    log = tmp_path / "calls"
    (tmp_path / "sitecustomize.py").write_text(WATCH.format(log=str(log)))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with Daemon(tmp_path, "--http-port", str(free_port()), env={"PYTHONPATH": path}) as daemon:
        client = daemon.client()
        assert store(client, 1, 2) == [True, True]
        client.release(client.load([key(1)], None).leases)
        client.close()
    calls = log.read_text().splitlines() if log.exists() else []
    assert [call for call in calls if "127.0.0.1" not in call and str(tmp_path) not in call] == []
