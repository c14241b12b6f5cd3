"""Under a service manager: its sockets are taken, and it hears of readiness, reloads, life and the end."""

import configparser
import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest
from lmcache_server import service
from lmcache_server.flags import FLAGS

from lmcache_core.spi import ConfigError
from tests.wire.daemons import PATIENCE, Daemon, Process, describe, key, store, wait_for

ROOT = Path(__file__).resolve().parents[2]

EXEC = """
import os, sys
numbers = eval(sys.argv[1])
for at, number in enumerate(numbers):
    os.dup2(number, 3 + at)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(numbers)))
os.execv(sys.argv[2], sys.argv[2:])
"""


class Managed(Daemon):
    """A daemon as systemd starts it: descriptors from 3 on, and where to talk to in the environment."""

    def __init__(self, folder, *flags, sockets=(), watchdog_s=0, **options):
        self.sockets = sockets
        self.told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.told.settimeout(PATIENCE)
        self.told.bind(f"{folder}/notify")
        env = {"NOTIFY_SOCKET": f"{folder}/notify"}
        if watchdog_s:
            env["WATCHDOG_USEC"] = str(int(watchdog_s * 1e6))
        try:
            super().__init__(folder, *flags, env=env, **options)
        except BaseException:
            self.kill()
            self.told.close()
            raise

    def start(self):
        if self.sockets and "--socket" in self.command:
            at = self.command.index("--socket")
            del self.command[at : at + 2]
        numbers = [sock.fileno() for sock in self.sockets]
        with open(self.log, "wb") as log:
            Process.__init__(
                self, [sys.executable, "-c", EXEC, repr(numbers), *self.command],
                env=self.environment, stdout=log, stderr=log, pass_fds=numbers,
            )  # fmt: skip
        self.told.settimeout(0.1)
        assert wait_for(self.silent_until_it_says, what="its readiness") == "READY=1"
        self.told.settimeout(PATIENCE)

    def silent_until_it_says(self):
        try:
            return self.hear()
        except TimeoutError:
            if self.child.poll() is not None:
                raise ChildProcessError(self.log.read_text()) from None
            return ""

    def hear(self):
        return self.told.recv(4096).decode()

    def silent(self):
        try:
            return not self.hear()
        except TimeoutError:
            return True

    def __exit__(self, *exc):
        super().__exit__(*exc)
        self.told.close()


@pytest.fixture
def listeners(tmp_path):
    """Two listening sockets above the numbers they are moved to."""
    import fcntl

    found = []
    for sock, address in (
        (socket.socket(socket.AF_UNIX), f"{tmp_path}/passed.sock"),
        (socket.socket(), ("127.0.0.1", 0)),
    ):
        with sock:
            sock.bind(address)
            sock.listen()
            found.append(socket.socket(fileno=fcntl.fcntl(sock, fcntl.F_DUPFD_CLOEXEC, 20)))
    yield found
    for sock in found:
        sock.close()


def test_manager_hears_of_readiness_reloads_and_the_end(tmp_path):
    with Managed(tmp_path) as daemon:
        assert daemon.serves()
        daemon.send(signal.SIGHUP)
        assert re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=\d+", daemon.hear())
        assert daemon.hear() == "READY=1"
        daemon.send(signal.SIGTERM)
        assert daemon.hear() == "STOPPING=1"
        assert daemon.child.wait(20) == 0


def test_watchdog_hears_of_a_loop_that_turns_and_of_no_stopped_one(tmp_path):
    with Managed(tmp_path, watchdog_s=0.2) as daemon:
        for _ in range(3):
            assert daemon.hear() == "WATCHDOG=1"
        daemon.send(signal.SIGSTOP)
        daemon.told.settimeout(0.5)
        assert wait_for(daemon.silent, 5)
        daemon.send(signal.SIGCONT)
        assert daemon.hear() == "WATCHDOG=1"


def test_passed_sockets_are_served_and_stay_after_the_end(tmp_path, listeners):
    path, port = listeners[0].getsockname(), listeners[1].getsockname()[1]
    with Managed(tmp_path, sockets=listeners, token="t") as daemon:
        daemon.path, ours = path, daemon.path
        assert not os.path.exists(ours)
        client = daemon.client()
        assert store(client, 1) == [True]
        about = describe(client)
        assert (about["socket"], about["tcp"]) == (path, f"127.0.0.1:{port}")
        client.close()
        from lmcache_core.wire.client import DaemonClient

        remote = DaemonClient(f"127.0.0.1:{port}", token="t", transfer="tcp")
        assert remote.lookup([key(1)]).leading == 1
        remote.close()
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", daemon.port or 5555)) != 0
        daemon.send(signal.SIGTERM)
        assert daemon.hear() == "STOPPING=1"
        assert daemon.child.wait(20) == 0
        assert os.path.exists(path)
        daemon.start()  # with the same sockets: whoever connected meanwhile is served
        client = wait_for(daemon.client)
        wait_for(lambda: client.home is not None)
        client.close()


def test_sockets_for_another_process_are_left_alone():
    env = {"LISTEN_PID": "1", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b"}
    assert service.passed(env) == ()
    assert env == {}


def test_what_is_passed_and_no_listening_stream_is_refused(tmp_path):
    with (
        socket.socket() as mute,
        pytest.raises(ChildProcessError, match="no listening stream"),
    ):
        Managed(tmp_path, sockets=[mute])


def test_passed_socket_that_others_reach_needs_the_token(tmp_path):
    with (
        socket.create_server(("0.0.0.0", 0)) as wide,
        pytest.raises(ChildProcessError, match=r"0\.0\.0\.0 is not this machine alone"),
    ):
        Managed(tmp_path, sockets=[wide])


def test_units_start_what_there_is():
    folder = ROOT / "deploy/systemd"
    units = {}
    for name in ("lmcache@.service", "lmcache@.socket"):
        units[name] = configparser.ConfigParser(strict=False, interpolation=None)
        units[name].optionxform = str
        units[name].read(folder / name)
    started = units["lmcache@.service"]["Service"]
    assert started["Type"] == "notify"
    words = started["ExecStart"].split()
    assert words[1:3] == ["lmcache", "server"]
    known = {flag.name for flag in FLAGS}
    assert {word for word in words if word.startswith("--")} <= known
    streams = re.findall(r"^ListenStream=(.*)$", (folder / "lmcache@.socket").read_text(), re.M)
    assert any(each.startswith("/run/lmcache-%i/") for each in streams)
    assert started["RuntimeDirectory"] == "lmcache-%i"


def test_no_service_manager_hears_nothing():
    service.tell(service.READY, {})
    with pytest.raises(ConfigError):
        service.passed({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "999"})
