"""TCP under TLS: the same protocol for who trusts the certificate, one line for who does not or cannot."""

import contextlib
import signal
import socket
import ssl

import pytest

from lmcache_core.config.records import DaemonConfig
from lmcache_core.spi import ConfigError
from lmcache_core.wire.address import Address, parse
from lmcache_core.wire.client import DaemonClient
from tests.wire.certificates import Authority
from tests.wire.daemons import (
    PATIENCE,
    Daemon,
    check_leases,
    describe,
    free_port,
    key,
    store,
    wait_for,
)  # fmt: skip
from tests.wire.test_tcp import TOKEN


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory, authority):
    certificate, private = authority.issue()
    with Daemon(
        tmp_path_factory.mktemp("d"), "--ssl-certfile", certificate, "--ssl-keyfile", private,
        port=free_port(), token=TOKEN, size="0.25",
    ) as found:  # fmt: skip
        yield found
        assert "Traceback" not in found.log.read_text()


def connect(daemon, ca, *, scheme="tls", **options):
    tail = f"?ca={ca}" if ca else ""
    options = {"token": TOKEN, "transfer": "tcp", **options}
    return DaemonClient(f"{scheme}://127.0.0.1:{daemon.port}{tail}", **options)


def one_line(caplog, *words):
    lines = [record.getMessage() for record in caplog.records if record.name == "lmcache.daemon"]
    assert len(lines) == 1 and "\n" not in lines[0], lines
    assert all(word in lines[0] for word in words), lines
    caplog.clear()


def test_values_stream_both_ways(daemon, authority):
    client = connect(daemon, authority.file, timeout=10)
    assert store(client, *range(10, 20), nbytes=1 << 20) == [True] * 10
    loaded = client.load([key(n) for n in range(10, 20)], None)
    check_leases(loaded.leases, range(10, 20))
    client.release(loaded.leases)
    assert describe(client)["memory"]["leased"] == 0
    client.close()


def test_client_of_the_same_node_moves_to_the_unix_socket(daemon, authority):
    client = connect(daemon, authority.file, transfer="auto", token="")
    assert store(client, 1) == [True]
    assert client._idle[0].local
    client.close()


def test_certificate_of_another_authority_is_refused_in_one_line(daemon, tmp_path, caplog):
    client = connect(daemon, Authority(tmp_path, "stranger").file)
    assert client.home is None
    one_line(caplog, f"tls://127.0.0.1:{daemon.port}", "not to be trusted")
    client.close()


def test_certificate_of_another_host_is_refused(tmp_path, authority, caplog):
    certificate, private = authority.issue("elsewhere.example")
    with Daemon(
        tmp_path, "--ssl-certfile", certificate, "--ssl-keyfile", private, port=free_port(),
        token=TOKEN,
    ) as daemon:  # fmt: skip
        client = connect(daemon, authority.file)
        assert client.home is None
        one_line(caplog, "not to be trusted", "127.0.0.1")
        client.close()


def test_plain_client_of_a_tls_port_is_told_to_use_tls(daemon, caplog):
    """Seen in LMCache#4213."""
    client = connect(daemon, "", scheme="tcp")
    assert client.home is None
    one_line(caplog, "speaks TLS", "tls://")
    client.close()
    wait_for(lambda: "refused 127.0.0.1: TLS" in daemon.log.read_text())
    assert daemon.log.read_text().count("refused 127.0.0.1") == 1  # once per peer


def test_tls_client_of_a_plain_port_is_told_that_there_is_none(tmp_path, authority, caplog):
    with Daemon(tmp_path, port=free_port(), token=TOKEN) as plain:
        client = connect(plain, authority.file)
        assert client.home is None
        one_line(caplog, "speaks no TLS")
        client.close()
        wait_for(lambda: "TLS where none is served" in plain.log.read_text())


def test_noise_on_a_tls_port_harms_nobody(daemon, authority):
    good = connect(daemon, authority.file)
    hello = bytes.fromhex("16030100050100000103")  # begins like TLS
    for noise in (b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", hello, hello * 500, bytes(70_000)):
        with (
            contextlib.suppress(ConnectionError),
            socket.create_connection(("127.0.0.1", daemon.port), 5) as sock,
        ):
            sock.sendall(noise)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
        assert good.lookup([key(1)]).unanswered == ()
    good.close()


def test_wrong_token_is_refused_under_tls_as_well(daemon, authority, caplog):
    client = connect(daemon, authority.file, token="wrong")
    assert client.home is None
    one_line(caplog, "wrong token")
    client.close()


def test_old_versions_of_tls_are_refused(daemon, authority):
    context = ssl.create_default_context(cafile=authority.file)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection(("127.0.0.1", daemon.port)) as sock,
        pytest.raises(OSError, match=r"(?i)version|reset"),
    ):
        context.wrap_socket(sock, server_hostname="127.0.0.1")


def test_stopped_daemon_costs_no_more_than_the_deadline(tmp_path, authority):
    certificate, private = authority.issue()
    with Daemon(
        tmp_path, "--ssl-certfile", certificate, "--ssl-keyfile", private, port=free_port(),
        token=TOKEN,
    ) as daemon:  # fmt: skip
        client = connect(daemon, authority.file, timeout=PATIENCE)
        assert store(client, 1) == [True]
        client.timeout = 0.2
        daemon.send(signal.SIGSTOP)
        begun = client.now()
        assert client.load([key(1)], None).leases == ()
        assert client.now() - begun < 1
        daemon.send(signal.SIGCONT)
        client.timeout = PATIENCE
        wait_for(lambda: client.load([key(1)], None).leases)
        client.close()


def test_renewed_certificate_is_taken_at_sighup(tmp_path, caplog):
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    certificate, private = old.issue()
    with Daemon(
        tmp_path, "--ssl-certfile", certificate, "--ssl-keyfile", private, port=free_port(),
        token=TOKEN,
    ) as daemon:  # fmt: skip
        assert new.issue() == (certificate, private)
        daemon.send(signal.SIGHUP)

        def trusted():
            client = connect(daemon, new.file)
            client.close()
            return client.welcome is not None

        wait_for(trusted)


def test_start_without_the_key_says_so_in_one_line(tmp_path, authority):
    certificate, _ = authority.issue()
    with pytest.raises(AssertionError, match="no certificate with its key in"):
        Daemon(tmp_path, "--ssl-certfile", certificate, "--ssl-keyfile", authority.file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tls://kv.example", ("kv.example", 5555, True, "")),
        ("tls://[::1]:7000?ca=/etc/kv/ca.pem", ("::1", 7000, True, "/etc/kv/ca.pem")),
        ("tcp://kv.example:1", ("kv.example", 1, False, "")),
    ],
)
def test_addresses(text, said):
    found = parse(text)
    assert (found.host, found.port, found.tls, found.ca) == said


def test_configuration_names_host_and_authority():
    config = DaemonConfig(host="kv.example", ca="/etc/kv/ca.pem")
    assert parse(config.address) == Address("", "kv.example", 5555, True, "/etc/kv/ca.pem")
    assert parse(DaemonConfig(host="tls://kv.example", port=7).address).tls
    assert parse(DaemonConfig(host="tls://kv.example", ca="/x").address).ca == "/x"


@pytest.mark.parametrize("text", ["tls://", "host:1?ca=/x", "tls://host/path"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match="not an address"):
        parse(text)


def test_unreadable_authority_is_said_when_the_port_answers(daemon, caplog):
    client = connect(daemon, "/nowhere.pem")
    assert client.home is None
    one_line(caplog, "no certificates can be read from /nowhere.pem")
    client.close()
