"""Real daemons and clients in processes of their own; nothing outlives its test."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from lmcache_core import frame
from lmcache_core.spi import Interior, Key, KVSpec, Refusal, SegmentSpec
from lmcache_core.wire import records, replies
from lmcache_core.wire.client import DaemonClient

PATIENCE = 20.0


def wait_for(condition, seconds=PATIENCE, what="the condition"):
    """Poll until a condition about another process holds; ``what`` may be asked for when it does not."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() >= end:
            what = what() if callable(what) else what
            raise AssertionError(f"{what} did not come about in {seconds} s")
        time.sleep(0.002)
    return value


class Process:
    """A child that is always killed in the end."""

    def __init__(self, command, **options):
        self.child = subprocess.Popen(command, **options)
        self.pid = self.child.pid

    def send(self, number):
        os.kill(self.pid, number)

    def kill(self):
        if self.child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
                os.kill(self.pid, signal.SIGKILL)
        return self.child.wait(PATIENCE)


class Daemon(Process):
    """``lmcache server`` on a socket in a folder of the test."""

    def __init__(self, folder, *flags, size="0.0625", port=0, token="", env=None):
        self.path = str(Path(folder) / "daemon.sock")
        self.port = port
        self.log = Path(folder) / "daemon.log"
        environment = {**os.environ, **(env or {})}
        environment.pop("LMCACHE_SERVER_TOKEN", None)
        if token:
            environment["LMCACHE_SERVER_TOKEN"] = token
        sized = () if "--config" in flags else ("--l1-size-gb", size)
        self.command = [
            sys.executable, "-m", "lmcache_core", "server", "--socket", self.path,
            "--port", str(port), "--http-port", "none", "--prometheus-port", "none", *sized, *flags,
        ]  # fmt: skip
        self.environment = environment
        self.start()

    def start(self):
        with open(self.log, "wb") as log:
            super().__init__(self.command, env=self.environment, stdout=log, stderr=log)
        wait_for(self.serves, what=self.doing)

    def doing(self):
        """What a daemon that does not serve yet does: a machine may give it no time."""
        times = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        spent = sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
        waits = Path(f"/proc/{self.pid}/wchan").read_text()
        said = self.log.read_text()[-1000:]
        return f"the daemon's socket (computed for {spent} s, waits in {waits!r}, said {said!r})"

    def serves(self):
        assert self.child.poll() is None, self.log.read_text()
        return f"(pid {self.pid}) serves on" in self.log.read_text()

    def client(self, **options):
        return DaemonClient(f"unix://{self.path}", **options)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.kill()


def describe(client):
    return json.loads(client.ask(replies.Document, records.Describe).json)


def identity_holds(memory):
    states = ("free", "clean", "dirty", "reserved", "quarantined")
    return sum(memory[state] for state in states) == memory["capacity"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


SPACE = bytes(range(32))
ROOM = frame.header_nbytes(1)


def key(number):
    return Key(SPACE, number.to_bytes(32, "big"))


def value(number, nbytes=65536):
    return bytes([number % 251]) * nbytes


def fill(reservation, number):
    """Write a sealed frame; returns its identity."""
    view = reservation.view
    nbytes = view.nbytes - ROOM
    view[ROOM:] = value(number, nbytes)
    segment = (SegmentSpec(0, 0, 0, nbytes),)
    spec = KVSpec("uint8", 256, 1, 0, 0, Interior.PAGE, segment)
    return frame.seal_value(view[:ROOM], view[ROOM:], reservation.key, spec=spec).identity


def store(client, *numbers, nbytes=65536, **how):
    """Store values and tell which became visible."""
    wants = [(key(number), ROOM + nbytes) for number in numbers]
    granted = client.reserve(wants, None, **how)
    pairs = [
        (n, held) for n, held in zip(numbers, granted, strict=True) if not isinstance(held, Refusal)
    ]
    identities = [fill(held, number) for number, held in pairs]
    return list(client.commit_batch([held for _, held in pairs], identities))


def check_leases(leases, numbers):
    for lease, number in zip(leases, numbers, strict=True):
        payload = lease.view[ROOM:]
        assert payload == value(number, payload.nbytes)
        assert frame.open_header(lease.view, key(number)).key == key(number)
