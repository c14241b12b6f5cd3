"""The commands for operators, run as their users run them, against a real daemon."""

import json
import os
import stat
import subprocess
import sys
import time
from signal import SIGTERM
from socket import create_connection, socket
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from server.tests.http.running import answered, lmcache
from tests.wire.daemons import SPACE, Daemon, Process, free_port, key, wait_for

NO_TORCH = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None
from lmcache_core.cli import main
sys.exit(main())
"""


def test_ping_and_describe_reach_the_daemon(daemon):
    found = answered(daemon, "ping")
    assert found["pid"] == daemon.pid
    assert 0 < found["seconds"] < 1
    assert answered(daemon, "describe")["chunk_size"] == 256
    said = lmcache(daemon, "describe").stdout
    assert f"(pid {daemon.pid})" in said
    assert "disk" in said


def test_commands_work_where_no_torch_is(daemon):
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, "ping", "--json"], capture_output=True, text=True,
        timeout=60, env={**os.environ, "LMCACHE_DAEMON": f"unix://{daemon.path}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pid"] == daemon.pid


def test_ls_query_and_clear_name_the_same_values(daemon, stored):
    keys = [key(number).text for number in (1, 2, 3, 4)]
    assert sorted(each["key"] for each in answered(daemon, "ls")) == keys
    assert len(answered(daemon, "ls", "--limit", "3")) == 3
    assert len(answered(daemon, "ls", "--tier", "disk", "--space", SPACE.hex())) == 4
    rows = answered(daemon, "query", keys[0], key(90).text, status=1)
    assert [(row["tier"], row["bytes"] > 0) for row in rows] == [("cpu", True), ("", False)]
    assert answered(daemon, "query", keys[0])[0]["tier"] == "cpu"
    assert answered(daemon, "clear", "--tier", "cpu") == {"cleared": 4}
    assert answered(daemon, "query", keys[0])[0]["tier"] == "disk"
    assert answered(daemon, "prefetch", *keys[:2]) == {
        "resident": 2, "asked": 2, "reason": "complete",
    }  # fmt: skip
    assert answered(daemon, "prefetch", key(90).text, status=1)["resident"] == 0
    assert answered(daemon, "move", keys[3], "--from", "disk", "--to", "cpu")["moved"] == 1
    assert keys[3] not in [each["key"] for each in answered(daemon, "ls", "--tier", "disk")]
    assert answered(daemon, "clear", "--all")["cleared"] >= 4
    assert answered(daemon, "ls") == []


def test_quota_freeze_and_flush(daemon):
    assert answered(daemon, "quota", "set", "bob", "1MiB") == {"tenant": "bob", "quota": 1 << 20}
    assert answered(daemon, "quota", "get", "bob")["quota"] == 1 << 20
    assert answered(daemon, "quota", "list")[0] == {"tenant": "bob", "quota": 1 << 20, "used": 0}
    assert answered(daemon, "quota", "delete", "bob")["quota"] is None
    assert answered(daemon, "quota", "get", "bob", status=1)["quota"] is None
    assert answered(daemon, "freeze") == {"frozen": True}
    assert answered(daemon, "describe")["frozen"] is True
    assert answered(daemon, "freeze", "--off") == {"frozen": False}
    assert answered(daemon, "flush") == {"left": 0, "left_bytes": 0}


def test_a_tier_is_shown_resized_taken_out_and_put_back(daemon):
    (tier,) = answered(daemon, "tiers", "list")
    assert (tier["name"], tier["plugin"], tier["enabled"]) == ("disk", "disk", True)
    size = tier["limit"]
    assert answered(daemon, "tiers", "limit", "disk", "64MiB")["limit"] == 64 << 20
    assert answered(daemon, "tiers", "list")[0]["limit"] == 64 << 20
    assert answered(daemon, "tiers", "limit", "disk", str(size))["limit"] == size
    assert answered(daemon, "tiers", "disable", "disk") == {"name": "disk", "enabled": False}
    assert answered(daemon, "tiers", "list")[0]["enabled"] is False
    assert answered(daemon, "tiers", "enable", "disk") == {"name": "disk", "enabled": True}
    assert answered(daemon, "tiers", "list")[0]["enabled"] is True


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tiers", "limit", "disk", "much"), "not a size"),
        (("tiers", "enable", "nope"), "no lower tier 'nope' is configured; there are: disk"),
        (("query", "zz"), "not a key: 'zz'"),
        (("clear",), "say what to clear"),
        (("clear", "--all", "--tier", "cpu"), "say what to clear"),
        (("clear", "--tier", "nope"), "there is no tier 'nope'; there are: cpu, disk"),
        (("ls", "--space", "12"), "not a key space: '12'"),
        (("ls", "--tier", "nope"), "there is no lower tier 'nope'"),
        (("quota", "set", "bob", "much"), "not a size"),
        (("ping", "--token-file", "/nowhere/token"), "it cannot be read"),
        (("ping", "--daemon", "tcp://x:y"), "not an address of a daemon"),
    ],
)
def test_a_mistake_is_said_in_one_line_with_status_2(daemon, words, said):
    done = lmcache(daemon, *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_no_daemon_is_status_3_at_once(tmp_path):
    begun = time.monotonic()
    for address in (f"unix://{tmp_path}/none.sock", f"localhost:{free_port()}"):
        done = lmcache(None, "ping", LMCACHE_DAEMON=address)
        assert done.returncode == 3
        assert done.stderr.startswith("lmcache: no daemon at ")
        assert done.stderr.count("\n") == 1
    assert time.monotonic() - begun < 20


def test_a_remote_daemon_wants_its_token(tmp_path):
    port = free_port()
    secret = tmp_path / "token"
    secret.write_text("secret\n")
    with Daemon(tmp_path, port=port, token="secret") as daemon:
        os.rename(daemon.path, f"{daemon.path}.away")  # as for another machine: TCP is all there is
        address = ("--daemon", f"localhost:{port}")
        assert lmcache(None, "ping", *address).returncode == 3
        assert lmcache(None, "ping", *address, LMCACHE_SERVER_TOKEN="wrong").returncode in (1, 3)
        assert lmcache(None, "ping", *address, "--token-file", str(secret)).returncode == 0
        assert lmcache(None, "ls", *address, LMCACHE_SERVER_TOKEN="secret").returncode == 0


def test_server_starts_http_beside_itself_and_it_ends_with_it(tmp_path):
    port, folder = free_port(), tmp_path / "run"
    env = {"LMCACHE_RUNTIME_DIR": str(folder)}
    with Daemon(tmp_path, "--http-port", str(port), env=env) as daemon:
        wait_for(lambda: f"serves on http://127.0.0.1:{port}" in daemon.log.read_text())
        token = folder / f"http-{port}.token"
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert probe(port)
        daemon.kill()
        wait_for(lambda: not probe(port), what="the end of the HTTP process")


def test_metrics_have_a_port_of_their_own_where_wanted(tmp_path):
    """Seen in local-inference-lab/rtx6kpro#98: one port for both could not be scraped and be safe."""
    port, admin = free_port(), free_port()
    flags = ("--prometheus-port", str(port), "--prometheus-host", "0.0.0.0")
    for others in ((), ("--http-port", str(admin))):
        with Daemon(tmp_path, *flags, *others, env={"LMCACHE_RUNTIME_DIR": str(tmp_path)}):
            wait_for(lambda: probe(port))
            with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                assert b"lmcache_" in answer.read()
            for path in ("/status", "/config", "/quota"):
                with pytest.raises(HTTPError, match="404"):
                    urlopen(f"http://127.0.0.1:{port}{path}")
            if others:
                wait_for(lambda: probe(admin))
            assert probe(admin) == bool(others)
        wait_for(lambda: not probe(port), what="the end of the HTTP process")


def probe(port):
    with socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_a_busy_port_is_said_in_one_line(tmp_path, web):
    done = lmcache(None, "http", "--port", str(web.port), "--daemon", f"unix://{tmp_path}/d.sock")
    assert done.returncode == 2
    assert (
        done.stderr == f"lmcache: cannot listen on 127.0.0.1:{web.port}: Address already in use\n"
    )


def test_http_stops_when_told_to_while_a_client_holds_on(daemon, tmp_path):
    log = tmp_path / "log"
    with open(log, "wb") as out:
        web = Process(
            [
                sys.executable, "-m", "lmcache_core", "http", "--daemon", f"unix://{daemon.path}",
                "--port", "0", "--http-token-file", str(tmp_path / "token"),
            ],
            stdout=out, stderr=out,
        )  # fmt: skip
    try:
        wait_for(lambda: "serves on" in log.read_text())
        port = int(log.read_text().split("http://127.0.0.1:")[1].split(";")[0])
        wait_for(lambda: answers(port))
        with create_connection(("127.0.0.1", port)) as held:
            held.sendall(b"GET /live HTTP/1.1\r\n")
            web.send(SIGTERM)
            assert web.child.wait(10) == 0
    finally:
        web.kill()


def answers(port):
    with create_connection(("127.0.0.1", port), timeout=10) as link:
        link.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return b" 200 " in link.recv(100)


def test_the_address_of_commands_is_no_setting_of_engines(daemon):
    assert lmcache(daemon, "config").returncode == 0
    found = answered(daemon, "config")
    assert not any("LMCACHE_DAEMON" in row["source"] for row in found["settings"])
