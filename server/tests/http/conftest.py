"""A daemon with a memory and a disk tier, and the HTTP process in front of it, both real."""

import http.client
import json
import os
import re
import sys

import pytest
from lmcache_server.client.operator import Operator

from lmcache_core.wire import records, replies
from tests.wire.daemons import Daemon, Process, store, wait_for


class Web(Process):
    """``lmcache http`` on a free port."""

    def __init__(self, folder, address, *flags):
        self.log = folder / "http.log"
        self.token_file = folder / "http.token"
        command = [
            sys.executable, "-m", "lmcache_core", "http", "--daemon", address, "--port", "0",
            "--http-token-file", str(self.token_file), *flags,
        ]  # fmt: skip
        with open(self.log, "wb") as log:
            super().__init__(command, stdout=log, stderr=log)
        self.port = int(wait_for(self.listens, what="the HTTP port"))
        self.token = self.token_file.read_text().strip()

    def listens(self):
        assert self.child.poll() is None, self.log.read_text()
        found = re.search(r"serves on http://[^ ]+:(\d+);", self.log.read_text())
        return found and found[1]

    def ask(self, method, path, body=None, *, token=True, **headers):
        """Status, headers and body (parsed where it is JSON)."""
        if token:
            headers["Authorization"] = f"Bearer {self.token if token is True else token}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            sent = None if body is None else json.dumps(body)
            connection.request(method, path, sent, {"Content-Type": "application/json", **headers})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        kind = answer.headers.get("content-type", "")
        return answer.status, dict(answer.headers), json.loads(text) if "json" in kind else text


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("d")
    disk = ("--l2-disk-path", str(folder / "kv"), "--l2-disk-size-gb", "0.1")
    with Daemon(folder, "--arena-mode", "shared-rw", *disk) as found:
        yield found


@pytest.fixture(scope="module")
def web(daemon, tmp_path_factory):
    found = Web(tmp_path_factory.mktemp("web"), f"unix://{daemon.path}")
    yield found
    found.kill()


@pytest.fixture
def web_of(tmp_path):
    started = []

    def start(address, *flags):
        started.append(Web(tmp_path, address, *flags))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.fixture
def stored(daemon):
    """Values 1 to 4 and no others, in memory and on disk."""
    client = daemon.client(timeout=5)
    client.ask(replies.Count, lambda id: records.Clear(id, 5.0))
    store(client, 1, 2, 3, 4)
    client.flush()
    client.close()


@pytest.fixture
def operator(daemon):
    found = Operator(f"unix://{daemon.path}")
    yield found
    found.close()


@pytest.fixture(autouse=True)
def _no_address(monkeypatch):
    for name in ("LMCACHE_DAEMON", "LMCACHE_SERVER_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    assert "LMCACHE_DAEMON" not in os.environ
