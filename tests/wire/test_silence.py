"""A client whose machine or network is gone says nothing: the kernel proves it, then its memory comes back."""

import socket
import subprocess
import time
from pathlib import Path

import pytest

from lmcache_core.wire.client import DaemonClient
from lmcache_core.wire.link import SILENCE_S, tune
from tests.wire.daemons import (
    ROOM,
    Daemon,
    Process,
    describe,
    free_port,
    identity_holds,
    store,
    wait_for,
)  # fmt: skip
from tests.wire.test_death import Client

TOKEN = "correct horse battery staple"
NETWORK = ["unshare", "--user", "--map-root-user", "--net", "--kill-child", "--fork", "--"]
NODE, ENGINE = "10.99.0.1", "10.99.0.2"
HERE = (
    f"ip link add node type veth peer name engine && ip addr add {NODE}/24 dev node && "
    'ip link set node up && exec "$@"'
)
THERE = f'read go && ip addr add {ENGINE}/24 dev engine && ip link set engine up && exec "$@"'
VALUE = 4 << 20


def child_of(pid):
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def inside(pid):
    return ["nsenter", "--target", str(pid), "--user", "--net", "--preserve-credentials"]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """A daemon on a network of its own, with one cable to another."""
    try:
        tried = subprocess.run([*NETWORK, "sh", "-c", HERE, "sh", "true"], capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if tried.returncode:
        pytest.skip(f"no network of one's own for this user: {tried.stderr.decode().strip()}")
    with Node(tmp_path_factory.mktemp("d"), port=free_port(), token=TOKEN, size="0.125") as found:
        yield found
        assert "Traceback" not in found.log.read_text()


class Node(Daemon):
    def start(self):
        command = [*NETWORK, "sh", "-c", HERE, "sh", *self.command, "--host", NODE]
        with open(self.log, "wb") as log:
            Process.__init__(self, command, env=self.environment, stdout=log, stderr=log)
        wait_for(lambda: "serves on" in self.log.read_text(), what="the daemon's socket")


class Far(Client):
    """A client at the other end of the cable."""

    def __init__(self, daemon):
        self.node = inside(child_of(daemon.pid))
        before = [
            *self.node,
            "unshare",
            "--net",
            "--kill-child",
            "--fork",
            "--",
            "sh",
            "-c",
            THERE,
            "sh",
        ]
        super().__init__(daemon, before, (f"{NODE}:{daemon.port}", TOKEN))
        own = child_of(wait_for(lambda: self.children(), what="the network of the client"))
        self.there = inside(own)
        self.command(self.node, "engine", "netns", str(own))
        self.child.stdin.write("go\n")
        assert self.do("lookup 1") == "done"

    def children(self):
        found = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return self.pid if found else 0

    def command(self, where, *words):
        subprocess.run([*where, "ip", "link", "set", *words], check=True)

    def cable(self, how):
        self.command(self.there, "engine", how)


def settled(watcher):
    memory = describe(watcher)["memory"]
    return memory["reserved"] == memory["leased"] == memory["quarantined"] == 0 and memory


def test_client_behind_a_cut_cable_gives_everything_back_in_time_and_not_before(daemon):
    """No FIN and no RST: one connection waits to be asked, the other has values for who does not take them."""
    watcher = daemon.client()
    assert store(watcher, *range(8), nbytes=VALUE) == [True] * 8
    with Far(daemon) as far:
        assert far.do("reserve 100 101") == "done"
        assert far.do("stream 0 1 2 3 4 5 6 7") == "done"
        far.cable("down")
        begun = time.monotonic()
        memory = describe(watcher)["memory"]
        assert memory["reserved"] == 2 * (ROOM + 65536)
        assert memory["leased"] >= VALUE, "all was sent before the cable was cut"
        clients = len(describe(watcher)["clients"])
        while time.monotonic() < begun + SILENCE_S - 2:  # silence alone proves nothing yet
            assert describe(watcher)["memory"]["reserved"] == 2 * (ROOM + 65536)
            time.sleep(0.2)
        assert identity_holds(wait_for(lambda: settled(watcher), SILENCE_S))
        assert time.monotonic() - begun < SILENCE_S + 2
        assert len(describe(watcher)["clients"]) == clients - 1
        far.cable("up")  # the process was alive all the time, and is served again
        wait_for(lambda: far.do("count 0 1 2") == "3", SILENCE_S + 5, "the way back")
    watcher.close()


def test_both_ends_of_tcp_ask_for_signs_of_life(tmp_path, monkeypatch):
    tuned = []
    monkeypatch.setattr(
        "lmcache_core.wire.link.tune", lambda sock: (tune(sock), tuned.append(sock))
    )
    with Daemon(tmp_path, port=free_port(), token=TOKEN) as node:
        client = DaemonClient(f"127.0.0.1:{node.port}", token=TOKEN, transfer="tcp")
        sock = tuned[0]
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * SILENCE_S
        probes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
        probes *= sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
        assert probes + sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= SILENCE_S
        waits = "timer:(keepalive"  # once nothing is under way
        wait_for(lambda: waits in timers(node.port).get(f":{node.port}", ""), what=waits)
        client.close()


def timers(port):
    """What the kernel waits for, by local port, for connections of this port (ss is the one that tells)."""
    listed = subprocess.run(["ss", "-Htno"], capture_output=True, text=True, check=True).stdout
    return {
        ":" + line.split()[3].rpartition(":")[2]: line
        for line in listed.splitlines()
        if str(port) in line
    }
