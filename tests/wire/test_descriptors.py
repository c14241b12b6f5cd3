"""Descriptors are few: a daemon that has none left serves on and takes new clients later, and keeps none that was sent."""

import contextlib
import os
import resource
import signal
import socket
import struct
import tempfile
import time
from types import SimpleNamespace

import pytest
from lmcache_server.greeting import _local_session

from lmcache_core.identity import probe_digest
from lmcache_core.wire import records, replies
from lmcache_core.wire.codec import frame
from tests.wire.daemons import PATIENCE, Daemon, describe, free_port, key, store, wait_for
from tests.wire.test_quiet import spent


@pytest.fixture
def daemon(tmp_path):
    with Daemon(tmp_path, "--arena-mode", "shared-rw") as found:
        yield found
        assert "Traceback" not in found.log.read_text()


def used(daemon):
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def test_a_daemon_without_descriptors_serves_who_is_there_and_rests(daemon):
    client = daemon.client(timeout=PATIENCE)
    assert store(client, 1) == [True]
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (used(daemon) + 8, 1024))
    with contextlib.ExitStack() as crowd:
        for _ in range(40):
            each = crowd.enter_context(socket.socket(socket.AF_UNIX))
            each.connect(daemon.path)  # the kernel takes them all
        wait_for(lambda: "refused everybody" in daemon.log.read_text(), what="the refusal")
        before = spent(daemon.pid)
        time.sleep(0.5)
        assert spent(daemon.pid) - before < 0.25, "it asks again and again"
        assert client.lookup([key(1)]).leading == 1
        assert daemon.log.read_text().count("refused everybody") == 1
    other = daemon.client(timeout=PATIENCE)
    wait_for(lambda: other.home is not None)
    assert other.lookup([key(1)]).leading == 1
    other.close()
    client.close()


def test_who_is_gone_before_it_is_accepted_is_passed_over(tmp_path):
    with Daemon(tmp_path, port=free_port()) as daemon:
        daemon.send(signal.SIGSTOP)
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", daemon.port)) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        daemon.send(signal.SIGCONT)
        client = daemon.client(timeout=PATIENCE)
        wait_for(lambda: client.home is not None)
        with socket.create_connection(("127.0.0.1", daemon.port)) as sock:
            sock.sendall(frame(records.Hello(1, records.VERSION, probe_digest(), 0)))
            assert sock.recv(4)
        assert "Traceback" not in daemon.log.read_text()
        client.close()


def test_descriptors_that_come_with_noise_are_not_kept(daemon):
    client = daemon.client(timeout=PATIENCE)
    before = used(daemon)
    hello = bytes(frame(records.Hello(1, records.VERSION, probe_digest(), 0)))
    with tempfile.TemporaryFile() as file, socket.socket(socket.AF_UNIX) as sock:
        sock.connect(daemon.path)
        rights = struct.pack("4i", *[file.fileno()] * 4)
        for at in range(len(hello) - 1):  # a byte and four descriptors at a time
            sock.sendmsg([hello[at : at + 1]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            client.ask(replies.Done, records.Ping)
        assert used(daemon) <= before + 4
        sock.sendall(hello[-1:])
        assert sock.recv(4)
    wait_for(lambda: used(daemon) <= before + 1)  # the client may have got another connection
    assert len(describe(client)["clients"]) == 1
    client.close()


def test_what_is_sent_in_place_of_a_pidfd_is_closed():
    """Where the kernel tells no pidfd of a peer from another pid namespace."""
    read, write = os.pipe()

    def getsockopt(*what):
        raise OSError

    link = SimpleNamespace(
        socket=SimpleNamespace(getsockopt=getsockopt), pid=0, pidfds=[write],
        daemon=SimpleNamespace(sessions=None),
    )  # fmt: skip
    hello = records.Hello(1, records.VERSION, probe_digest(), 0)
    with pytest.raises(ValueError, match="not a pidfd"):
        _local_session(link, hello, replies.Welcome(1, 1, b"", b"", 0, 0))
    assert os.read(read, 1) == b"", "nobody holds the other end"
    os.close(read)
