"""Daemon and clients in containers of their own: other users, mounts, IPC, network and pids, one folder in common."""

import subprocess
from pathlib import Path

import pytest

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
from tests.wire.test_death import Client

CONTAINER = [
    "unshare", "--user", "--map-user=1000", "--map-group=1000", "--mount", "--ipc", "--net",
    "--pid", "--fork", "--kill-child", "--mount-proc", "--",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def allowed():
    try:
        tried = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True, timeout=10)
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if tried.returncode:
        pytest.skip(f"the kernel refuses namespaces to this user: {tried.stderr.strip()}")


class Contained(Daemon):
    def start(self):
        with open(self.log, "wb") as log:
            Process.__init__(
                self, [*CONTAINER, *self.command], env=self.environment, stdout=log, stderr=log
            )
        wait_for(lambda: "serves on" in self.log.read_text(), what="the daemon's socket")


class ContainedClient(Client):
    def __init__(self, daemon):
        super().__init__(daemon, CONTAINER)


@pytest.fixture(scope="module", params=["shared-rw", "sealed"])
def daemon(request, tmp_path_factory):
    with Contained(tmp_path_factory.mktemp("d"), "--arena-mode", request.param) as found:
        yield found
        assert "Traceback" not in found.log.read_text()


def child_of(pid):
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return Path(f"/proc/{child}")


def test_daemon_has_no_privileges_and_shares_no_ipc(daemon):
    """Seen in LMCache#2749."""
    process = child_of(daemon.pid)
    status = process.joinpath("status").read_text()
    for kind in ("CapEff", "CapPrm", "CapAmb"):
        assert f"{kind}:\t0000000000000000" in status
    for space in ("user", "mnt", "ipc", "net", "pid"):
        ours = Path(f"/proc/self/ns/{space}").readlink()
        assert process.joinpath(f"ns/{space}").readlink() != ours


def test_what_one_container_stores_another_reads(daemon):
    """Seen in LMCache#4394."""
    watcher = daemon.client()
    with ContainedClient(daemon) as writer, ContainedClient(daemon) as reader:
        assert writer.do("reserve 7") == "done"
        assert writer.do("commit 7") == "1"
        assert reader.do("lease 7") == "done"
        assert describe(watcher)["memory"]["leased"] == ROOM + 65536
        loaded = watcher.load([key(7)], None)  # and so does who is in no container
        check_leases(loaded.leases, [7])
        watcher.release(loaded.leases)
    assert store(watcher, 8) == [True]
    watcher.close()


def test_death_in_another_container_gives_everything_back(daemon):
    watcher = daemon.client()
    store(watcher, 1, 2)
    with ContainedClient(daemon) as victim:
        victim.do("lease 1 2")
        victim.do("reserve 100 101")
        memory = describe(watcher)["memory"]
        assert memory["leased"] and memory["reserved"]
        victim.kill()

        def settled():
            memory = describe(watcher)["memory"]
            return memory["reserved"] == memory["leased"] == memory["quarantined"] == 0 and memory

        assert identity_holds(wait_for(settled))
    watcher.close()
