"""Over TCP: nothing but the hello without the token; with it, values stream straight from and to memory."""

import os
import socket

import pytest

from lmcache_core.identity import probe_digest
from lmcache_core.spi import Refusal
from lmcache_core.storage.results import Reason
from lmcache_core.wire import records, replies
from lmcache_core.wire.client import DaemonClient
from lmcache_core.wire.codec import LENGTH, decode_reply, frame
from lmcache_core.wire.link import Link
from tests.wire.daemons import (
    PATIENCE,
    ROOM,
    Daemon,
    check_leases,
    describe,
    fill,
    free_port,
    identity_holds,
    key,
    store,
    wait_for,
)  # fmt: skip

TOKEN = "correct horse battery staple"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("d")
    with Daemon(folder, port=free_port(), token=TOKEN, size="0.25") as found:
        yield found


def connect(daemon, **options):
    return DaemonClient(f"127.0.0.1:{daemon.port}", **options)


def exchange(sock, record):
    sock.sendall(frame(record))
    return receive(sock)


def receive(sock):
    head = sock.recv(4, socket.MSG_WAITALL)
    if len(head) < 4:
        return None
    return decode_reply(sock.recv(LENGTH.unpack(head)[0], socket.MSG_WAITALL))


def hello(**changes):
    fields = {"id": 1, "version": records.VERSION, "probe": probe_digest(), "pid": os.getpid()}
    return records.Hello(**{**fields, **changes})


def test_client_on_the_same_node_moves_to_the_socket_of_the_same_boot(daemon):
    """Seen in LMCache#1165."""
    client = connect(daemon)
    assert store(client, 1) == [True]
    assert client._idle[0].local
    client.close()


def test_values_stream_with_the_token(daemon):
    """Seen in LMCache#4534."""
    client = connect(daemon, token=TOKEN, transfer="tcp")
    assert store(client, *range(10, 20), nbytes=1 << 20) == [True] * 10
    loaded = client.load([key(n) for n in range(10, 21)], None)
    assert loaded.reason is Reason.MISS
    check_leases(loaded.leases, range(10, 20))
    client.release(loaded.leases)
    memory = describe(client)["memory"]
    assert memory["leased"] == memory["reserved"] == 0 and identity_holds(memory)
    client.close()


@pytest.mark.parametrize("how", [{}, {"token": TOKEN, "transfer": "tcp"}], ids=["socket", "tcp"])
def test_hundreds_of_values_stream_in_one_commit(daemon, how):
    client = connect(daemon, timeout=PATIENCE, **how)
    first = 2000 + 1000 * len(how)
    assert store(client, *range(first, first + 700), nbytes=64) == [True] * 700
    loaded = client.load([key(n) for n in range(first, first + 700)], None)
    check_leases(loaded.leases, range(first, first + 700))
    client.release(loaded.leases)
    assert client.delete([key(n) for n in range(first, first + 700)]) == 700
    client.close()


def test_sealed_memory_is_read_in_place_and_stored_by_sending(daemon):
    """Seen in vllm#52234."""
    client = daemon.client()
    assert not client.home.writable
    assert store(client, *range(30, 34), nbytes=1 << 20) == [True] * 4
    loaded = client.load([key(n) for n in range(30, 34)], None)
    check_leases(loaded.leases, range(30, 34))
    with pytest.raises(TypeError):
        loaded.leases[0].view[0] = 1
    client.release(loaded.leases)
    client.close()


def test_end_of_a_streaming_client_frees_what_it_reserved(daemon):
    client = connect(daemon, token=TOKEN, transfer="tcp")
    (held,) = client.reserve([(key(40), ROOM + 4096)], None)
    assert not isinstance(held, Refusal)
    client.close()
    watcher = daemon.client()
    wait_for(lambda: describe(watcher)["memory"]["reserved"] == 0)
    watcher.close()


def test_connection_cut_in_the_middle_of_a_value_leaves_nothing(daemon):
    watcher = daemon.client()
    before = describe(watcher)["memory"]["free"]
    client = connect(daemon, token=TOKEN, transfer="tcp")
    (held,) = client.reserve([(key(50), ROOM + (4 << 20))], None)
    link = client._idle[0]
    identity = fill(held, 50)
    record = records.Commit(99, [held.grant], identity, None, ROOM + (4 << 20))
    link.send([frame(record), memoryview(bytes(1 << 20))], client.now() + 1)
    client.close()
    wait_for(lambda: describe(watcher)["memory"]["free"] == before)
    assert watcher.lookup([key(50)]).leading == 0
    watcher.close()


def test_value_damaged_on_its_way_in_never_becomes_visible(daemon):
    client = connect(daemon, token=TOKEN, transfer="tcp")
    held = client.reserve([(key(n), ROOM + 4096) for n in (60, 61)], None)
    identities = [fill(each, n) for each, n in zip(held, (60, 61), strict=True)]
    held[1].view[ROOM + 7] ^= 1
    assert client.commit_batch(held, identities) == [True, False]
    assert client.lookup([key(61)]).leading == 0
    assert describe(client)["memory"]["reserved"] == 0
    client.close()


def test_value_damaged_on_its_way_out_is_no_hit(daemon, monkeypatch):
    client = connect(daemon, token=TOKEN, transfer="tcp")
    assert store(client, 70, 71, nbytes=4096) == [True, True]
    read, views = Link.read_into, []

    def damage(link, view, until):
        read(link, view, until)
        views.append(view)
        view[-1] ^= len(views) == 2

    monkeypatch.setattr(Link, "read_into", damage)
    loaded = client.load([key(70), key(71)], None)
    assert loaded.reason is Reason.DAMAGED
    check_leases(loaded.leases, [70])
    client.close()


def test_without_the_token_there_is_the_hello_and_nothing_else(daemon):
    with socket.create_connection(("127.0.0.1", daemon.port)) as sock:
        welcome = exchange(sock, hello())
        assert isinstance(welcome, replies.Welcome)
        assert welcome.path == daemon.path and welcome.challenge and not welcome.segments
        answer = exchange(sock, records.Ping(2))
        assert isinstance(answer, replies.Failed) and answer.kind == "denied"
        assert receive(sock) is None


def test_wrong_token_is_refused_and_a_proof_is_good_for_one_connection_only(daemon):
    import hmac

    client = connect(daemon, token="wrong", transfer="tcp")
    assert client.home is None
    client.close()
    with socket.create_connection(("127.0.0.1", daemon.port)) as first:
        welcome = exchange(first, hello())
        proof = hmac.digest(TOKEN.encode(), welcome.challenge + welcome.boot, "sha256")
        assert isinstance(exchange(first, records.Auth(2, proof)), replies.Done)
        assert isinstance(exchange(first, records.Ping(3)), replies.Done)
    with socket.create_connection(("127.0.0.1", daemon.port)) as second:
        assert exchange(second, hello()).challenge != welcome.challenge
        assert isinstance(exchange(second, records.Auth(2, proof)), replies.Failed)
        assert receive(second) is None


def test_client_that_reaches_neither_socket_is_told_it_needs_the_token(tmp_path, caplog):
    """Seen in LMCache#3862."""
    with Daemon(tmp_path, port=free_port()) as daemon:
        os.rename(daemon.path, f"{daemon.path}.away")
        client = connect(daemon)
        assert client.home is None
        assert "needs its token" in caplog.text
        client.close()


def test_another_daemon_behind_the_path_is_not_trusted(tmp_path, caplog):
    """Seen in LMCache#1165."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with Daemon(tmp_path / "a", port=free_port()) as one, Daemon(tmp_path / "b") as two:
        os.rename(two.path, one.path)
        client = connect(one)
        assert client.home is None and "another daemon" in caplog.text
        client.close()
