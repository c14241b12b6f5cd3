"""What ``lmcache server`` opens when it is told nothing: HTTP and metrics, in a process that never harms the daemon."""

import os
import sys
from pathlib import Path
from signal import SIGTERM
from socket import create_server, socket
from urllib.request import urlopen

import pytest
from lmcache_server.command import _parse, beside_flags
from lmcache_server.http import command

from lmcache_core.spi import ConfigError
from server.tests.http.running import lmcache
from tests.wire.daemons import PATIENCE, Daemon, free_port, store, wait_for

STARTED = """
import sys
from lmcache_core.cli import main
from lmcache_server.http import command
command.PORT, command.METRICS_PORT = map(int, sys.argv[1:3])
sys.modules.update(dict.fromkeys(sys.argv[3].split()))
sys.exit(main(sys.argv[4:]))
"""
SLOW = 90.0
"""Seconds: much is imported before HTTP is served, on a machine that has other things to do."""
HTTP = ["--port", "8080", "--host", "127.0.0.1"]
METRICS = ["--prometheus-port", "9090", "--prometheus-host", "127.0.0.1"]


class Plain(Daemon):
    """``lmcache server`` without a word about HTTP, where the default ports are others.

    Args:
        metrics: port of the metrics, one that is free when none is said.
        missing: modules that are not installed.
    """

    def __init__(self, folder, *flags, metrics=0, missing="", **options):
        self.web, self.metrics, self.missing = free_port(), metrics or free_port(), missing
        super().__init__(folder, *flags, env={"LMCACHE_RUNTIME_DIR": str(folder)}, **options)

    def start(self):
        at = self.command.index("--http-port")
        words = [*self.command[3:at], *self.command[at + 4 :]]
        ports = (str(self.web), str(self.metrics))
        self.command = [sys.executable, "-c", STARTED, *ports, self.missing, *words]
        super().start()

    def children(self):
        return Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()

    def works(self):
        client = self.client()
        assert store(client, 1) == [True]
        client.close()


def listens(port):
    with socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def said(daemon):
    return [line for line in daemon.log.read_text().splitlines() if line.startswith("lmcache: ")]


def test_both_ports_are_open_are_named_and_end_with_the_daemon(tmp_path):
    with Plain(tmp_path) as daemon:
        wait_for(lambda: listens(daemon.web) and listens(daemon.metrics), SLOW, "both ports")
        with urlopen(f"http://127.0.0.1:{daemon.web}/health", timeout=PATIENCE) as answer:
            assert answer.status == 200
        with urlopen(f"http://127.0.0.1:{daemon.metrics}/metrics", timeout=PATIENCE) as answer:
            assert b"lmcache_" in answer.read()
        text = daemon.log.read_text()
        assert f"serves on http://127.0.0.1:{daemon.web}; token in {tmp_path}/" in text
        assert f"serves /metrics on http://127.0.0.1:{daemon.metrics}\n" in text
        assert said(daemon) == []
        daemon.send(SIGTERM)
        assert daemon.child.wait(PATIENCE) == 0
        wait_for(lambda: not listens(daemon.web) and not listens(daemon.metrics), what="the end")


def test_a_port_that_is_taken_is_said_in_one_line_and_the_rest_serves(tmp_path):
    """A Prometheus of the node has 9090, on all addresses."""
    with create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with Plain(tmp_path, metrics=port) as daemon:
            wait_for(lambda: listens(daemon.web), SLOW, "the HTTP port")
            assert said(daemon) == [
                f"lmcache: cannot listen on 127.0.0.1:{port}: Address already in use; "
                "--prometheus-port PORT takes another one, --prometheus-port none takes none"
            ]
            assert "serves /metrics" not in daemon.log.read_text()
            daemon.works()


def test_where_every_port_is_taken_there_is_no_http_process(web):
    taken = str(web.port)
    flags = ("--until-stdin-ends", "--port", taken, "--prometheus-port", taken)
    done = lmcache(None, "http", *flags)
    assert done.returncode == 2
    assert [line.partition("in use; ")[2] for line in done.stderr.splitlines()] == [
        f"{flag} PORT takes another one, {flag} none takes none"
        for flag in ("--prometheus-port", "--http-port")
    ]


@pytest.mark.parametrize("flags", [("--http-port", "none", "--disable-metrics"), ("--private",)])
def test_nothing_is_opened_where_it_is_switched_off_or_engines_start_the_daemon(tmp_path, flags):
    with Plain(tmp_path, *flags) as daemon:
        daemon.works()
        assert daemon.children() == ""
        assert said(daemon) == []


def test_a_package_that_is_missing_is_said_in_one_line_and_the_daemon_serves(tmp_path):
    with Plain(tmp_path, missing="uvicorn prometheus_client") as daemon:
        daemon.works()
        assert said(daemon) == [
            "lmcache: no HTTP and no metrics port: uvicorn, prometheus_client not installed; "
            "`pip install fastapi uvicorn prometheus-client` brings them, "
            "--http-port none --prometheus-port none does without"
        ]
        assert daemon.children() == ""


@pytest.mark.parametrize(
    ("flags", "started"),
    [
        ("", HTTP + METRICS),
        ("--http-port none", [*METRICS, "--only-prometheus"]),
        ("--http-port off --prometheus-port none", []),
        ("--disable-metrics", HTTP),
        ("--disable-observability --prometheus-port 9090", HTTP),
        ("--prometheus-port none", HTTP),
        ("--http-port 8080 --http-host 127.0.0.1", HTTP + METRICS),
        ("--private", []),
        ("--private --http-host 127.0.0.1", []),
        ("--private --http-port 8080", HTTP),
        ("--private --prometheus-port 9090", [*METRICS, "--only-prometheus"]),
    ],
)
def test_flags_of_the_process_beside_the_daemon(flags, started):
    assert beside_flags(_parse(flags.split())) == started


@pytest.mark.parametrize("written", ["no", "65536", "-1"])
def test_a_port_that_is_none_is_refused(written):
    with pytest.raises(ConfigError, match="--http-port"):
        beside_flags(_parse([f"--http-port={written}"]))


def test_an_interrupt_of_the_terminal_ends_the_daemon_alone(tmp_path):
    """Both would get it; the HTTP process stays until the daemon has ended."""
    with Plain(tmp_path, "--prometheus-port", "none") as daemon:
        (child,) = wait_for(daemon.children).split()
        wait_for(lambda: os.getpgid(int(child)) == int(child), what="a group of its own")


def test_a_process_that_cannot_be_started_is_said_in_one_line(monkeypatch, capsys):
    def refused(*_, **__):
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(command.subprocess, "Popen", refused)
    assert command.beside("/run/kv.sock", "--port", "0") is None
    assert capsys.readouterr().err == "lmcache: no HTTP and no metrics port: no more processes\n"
