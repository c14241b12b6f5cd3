"""The private daemon: one per configuration, found by everybody, ended after the last, never left behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from lmcache_core.config import load
from lmcache_core.spi import Unavailable
from lmcache_core.wire.autostart import connect_private, digest
from tests.wire.daemons import describe, key, store, wait_for

SETTINGS = {
    "daemon": {"private": True, "grace": "1s"},
    "tiers": [{"cpu": {"size": "32MiB", "populate": False}}],
}


@pytest.fixture
def runtime(monkeypatch, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("LMCACHE_RUNTIME_DIR", str(folder))
    yield folder
    wait_for(lambda: not processes(folder), 15, "the end of private daemons")


def processes(folder):
    """Daemons that serve in this folder."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                command = Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue
            if b"server" in command and str(folder).encode() in command:
                found.append(int(name))
    return found


def connect(**changes):
    return connect_private(load(env={}, flags={**SETTINGS, **changes}))


CHILD = """
    import sys, time
    from lmcache_core.config import load
    from lmcache_core.wire.autostart import connect_private
    client = connect_private(load(env={}, flags=%r))
    print(client.welcome.pid, flush=True)
    sys.stdin.read() if sys.argv[1] == "wait" else None
    client.close()
"""


def child(order):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD) % (SETTINGS,), order],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_starters_at_the_same_moment_get_one_daemon(runtime):
    children = [child("go") for _ in range(4)]
    pids = {each.communicate(timeout=30)[0].strip() for each in children}
    assert len(pids) == 1 and len(processes(runtime)) <= 1


def test_next_engine_adopts_what_the_first_has_stored(runtime):
    """Seen in Mooncake#2306."""
    first = connect()
    assert store(first, 1) == [True]
    first.close()
    second = connect()
    assert second.lookup([key(1)]).leading == 1
    second.close()


def test_another_configuration_has_a_daemon_of_its_own(runtime):
    """Seen in LMCache#1122."""
    one = load(env={}, flags=SETTINGS)
    other = load(env={}, flags={**SETTINGS, "chunk_size": 64})
    impatient = load(env={}, flags={**SETTINGS, "daemon": {"private": True, "timeout": "2s"}})
    assert digest(one) != digest(other)
    assert digest(one) == digest(impatient)


def test_memory_is_configured_per_worker(runtime):
    """Seen in LMCache#2901.

    Seen in SemiAnalysisAI/InferenceX#1709.
    """
    client = connect(daemon={"private": True, "grace": "1s", "workers": 2})
    assert describe(client)["memory"]["capacity"] == 64 << 20
    client.close()


def test_daemon_ends_after_its_clients_were_killed(runtime):
    children = [child("wait") for _ in range(2)]
    for each in children:
        assert int(each.stdout.readline()) in processes(runtime)
    for each in children:
        each.kill()
        each.wait()
        each.stdin.close()
        each.stdout.close()
    begun = time.monotonic()
    wait_for(lambda: not processes(runtime), 10)
    assert time.monotonic() - begun < 5


def test_daemon_stands_alone(runtime):
    client = connect()
    pid = client.welcome.pid
    assert os.getsid(pid) == pid != os.getsid(0)
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"PYTEST_CURRENT_TEST" not in environment
    assert Path(f"/proc/{pid}/cwd").resolve() == Path("/")
    assert os.stat(client.address.path).st_mode & 0o777 == 0o600
    client.close()


def test_daemon_killed_under_its_engine_is_started_again(runtime):
    client = connect()
    store(client, 1)
    boot = client.home.boot
    os.kill(client.welcome.pid, 9)
    wait_for(lambda: client.home is not None and client.home.boot != boot, 10)
    assert store(client, 1) == [True]
    client.close()


def test_daemon_that_hangs_with_a_full_queue_holds_up_no_start(runtime):
    """Whoever is stopped accepts nobody, and a blocking connect to a full queue has no end."""
    client = connect()
    path = client.address.path
    os.kill(client.welcome.pid, signal.SIGSTOP)
    waiting = []
    try:
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting.append(
                    socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                )
                waiting[-1].connect(path)
        late = []
        starter = threading.Thread(target=lambda: late.append(connect()), daemon=True)
        starter.start()
        starter.join(10)
        assert late and late[0].home is None
    finally:
        os.kill(client.welcome.pid, signal.SIGCONT)
        for each in waiting:
            each.close()
    starter.join(10)
    wait_for(lambda: late[0].home is not None, 10)
    late[0].close()
    client.close()


def test_daemon_that_cannot_start_says_why(runtime):
    with pytest.raises(Unavailable, match="does not fit"):
        connect(tiers=[{"cpu": {"size": "100TiB"}}])


def test_long_runtime_folder_falls_back_to_a_short_path(runtime, monkeypatch, tmp_path):
    deep = tmp_path / ("x" * 120)
    deep.mkdir(mode=0o700)
    monkeypatch.setenv("LMCACHE_RUNTIME_DIR", str(deep))
    client = connect()
    assert len(client.address.path) <= 100
    assert client.home is not None
    client.close()
    wait_for(lambda: not processes(deep), 10)
