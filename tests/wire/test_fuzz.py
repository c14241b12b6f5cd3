"""Whatever comes in, on either port, ends that connection at most; the daemon serves on, its sums right."""

import contextlib
import os
import socket
import threading

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_core.wire import records
from lmcache_core.wire.codec import LENGTH, decode_reply, decode_request, frame
from tests.wire.daemons import (
    PATIENCE,
    Daemon,
    check_leases,
    describe,
    free_port,
    identity_holds,
    key,
    store,
)
from tests.wire.test_tcp import TOKEN, exchange, hello

KINDS = [
    kind
    for kind in vars(records).values()
    if isinstance(kind, type) and issubclass(kind, records.Record)
    and kind not in (records.Record, records.Message)
]  # fmt: skip
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=True),
    st.binary(max_size=80), st.text(max_size=20), st.just(bytes(32)),
)  # fmt: skip
ANYTHING = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=6), max_leaves=12)
RELAXED = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("d"), port=free_port(), token=TOKEN) as found:
        client = found.client()
        store(client, 1)
        yield found
        assert "Traceback" not in found.log.read_text()
        loaded = client.load([key(1)], None)
        check_leases(loaded.leases, [1])
        client.release(loaded.leases)
        memory = describe(client)["memory"]
        assert identity_holds(memory)
        client.close()


def send(daemon, data, *, greeted):
    """Send bytes on both ports; the daemon must answer somebody else afterwards."""
    for family, address in (
        (socket.AF_UNIX, daemon.path), (socket.AF_INET, ("127.0.0.1", daemon.port)),
    ):  # fmt: skip
        with socket.socket(family) as sock:
            sock.settimeout(5)
            sock.connect(address)
            if greeted and family == socket.AF_UNIX:
                exchange(sock, hello())
            try:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass
            except ConnectionError:
                pass


@RELAXED
@given(st.binary(max_size=200), st.booleans())
def test_noise_is_refused(daemon, data, greeted):
    """Seen in sglang#24618."""
    send(daemon, data, greeted=greeted)


@RELAXED
@given(st.sampled_from(KINDS), st.lists(ANYTHING, max_size=12), st.booleans())
def test_records_with_any_fields_are_refused_or_answered(daemon, kind, fields, greeted):
    body = msgspec.msgpack.encode([kind.__name__.lower(), 7, *fields])
    send(daemon, LENGTH.pack(len(body)) + body, greeted=greeted)


@RELAXED
@given(st.data())
def test_well_formed_requests_out_of_place_do_no_harm(daemon, data):
    runs = [records.Run(bytes(32), 0, bytes(32))]
    ids = st.lists(st.integers(0, 2**63 - 1), max_size=3)
    record = data.draw(st.one_of(
        st.builds(records.Commit, st.just(5), ids, st.binary(max_size=64), st.none(), st.integers(0, 1 << 32)),
        st.builds(records.Part, st.just(5), ids, st.binary(max_size=64)),
        st.builds(records.Release, ids, st.lists(st.tuples(st.integers(0, 9), ids), max_size=2)),
        st.builds(records.Abort, ids),
        st.builds(records.Dispatch, st.text(max_size=5), ids),
        st.builds(records.Reserve, st.just(5), st.just(runs), st.binary(max_size=16), engine=st.text(max_size=3)),
        st.builds(records.Register, st.just(5), st.text(max_size=5), st.integers(-1, 9), st.integers(1, 9)),
        st.builds(records.Tier, st.just(5), st.text(max_size=5), st.text(max_size=5)),
        st.builds(records.List, st.just(5), st.text(max_size=5), st.binary(max_size=5), st.text(max_size=5)),
        st.builds(records.Auth, st.just(5), st.binary(min_size=32, max_size=32)),
        st.builds(records.Move, st.just(5), st.just(runs), st.text(max_size=5), st.text(max_size=5), st.just(1.0)),
    ))  # fmt: skip
    send(daemon, bytes(frame(record)), greeted=True)


def test_oversized_frames_are_refused_before_they_are_read(daemon):
    for length in (records.MOST_FRAME + 1, 0xFFFFFFFF):
        send(daemon, LENGTH.pack(length) + b"x" * 100, greeted=True)
    send(daemon, LENGTH.pack(5000) + b"x" * 100, greeted=False)  # nobody says so much for a hello


def test_pickled_bytes_run_nothing(daemon, tmp_path):
    """Seen in InternLM/lmdeploy#4804."""
    import pickle

    class Bomb:
        def __reduce__(self):
            return open, (str(tmp_path / "boom"), "w")

    bomb = pickle.dumps(Bomb())
    send(daemon, LENGTH.pack(len(bomb)) + bomb, greeted=False)
    send(daemon, bytes(frame(records.Register(1, "e", 0, 1, bomb, [], []))), greeted=True)
    assert not (tmp_path / "boom").exists()


@given(st.binary(max_size=300))
def test_decoders_raise_one_error_only(data):
    for decode in (decode_request, decode_reply):
        with contextlib.suppress(msgspec.DecodeError):
            decode(data)


def test_clients_that_greet_at_once_do_not_disturb_each_other(daemon):
    """Seen in bytedance/InfiniStore#82."""
    together, served = threading.Barrier(8), []

    def greet(at):
        together.wait()
        if at % 2:
            send(daemon, bytes([0xFF - at]) * 64, greeted=at > 4)
            return
        client = daemon.client(timeout=PATIENCE)
        served.append(client.lookup([key(1)]).leading)
        client.close()

    threads = [threading.Thread(target=greet, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert served == [1] * 4


def test_one_peer_is_logged_once(daemon):
    send(daemon, b"\xff" * 8, greeted=False)
    lines = [line for line in daemon.log.read_text().splitlines() if "refused" in line]
    peers = [line.partition("refused ")[2].partition(":")[0] for line in lines]
    assert sorted(peers) == ["127.0.0.1", f"pid {os.getpid()}"]
