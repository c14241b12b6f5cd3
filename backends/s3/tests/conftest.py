"""Servers for the tests: a pretended S3 (moto), real ones (SeaweedFS), and what stands between; and a tier on one."""

import contextlib
import dataclasses
import http.client
import itertools
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from lmcache_backend_s3 import S3Backend
from lmcache_backend_s3.faking import PretendedServer
from lmcache_backend_s3.serving import START, SeaweedServer, find_server

from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.testing.harness import run_real
from lmcache_core.testing.rig import eventually, opened
from lmcache_core.testing.services import need_service

_numbers = itertools.count()


class Between:
    """A proxy before a real server. ``twist(request) -> (status, headers, body)`` may answer in its place, or change
    ``request.headers`` and return None."""

    def __init__(self, server, twist):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle(self):
                with contextlib.suppress(ConnectionError):
                    super().handle()

            def log_message(self, *args):
                pass

            def pass_on(self):
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                answer = twist(self)
                if answer is None:
                    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
                    with contextlib.closing(connection):
                        connection.request(self.command, self.path, body, dict(self.headers))
                        response = connection.getresponse()
                        answer = response.status, dict(response.headers), response.read()
                status, headers, content = answer
                self.send_response_only(status)
                length = {"content-length": str(len(content))}
                for name, text in (length | {k.lower(): v for k, v in headers.items()}).items():
                    if text is not None:
                        self.send_header(name, text)
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()


def on(config, kind=S3Backend, **options):
    """A tier; short patience unless told otherwise."""
    patience = {"timeout": 1.0, "connect_timeout": 1.0}
    config = dataclasses.replace(config, **(patience | options))
    return opened(kind(config, real_context()), group=1)


@pytest.fixture
def tier():
    return on


@pytest.fixture
def drive():
    """Run a coroutine; one that takes longer than 20 s fails."""
    return lambda main: run_real(main, 20.0)


def real(folder, *flags):
    """A real server, or a skip that says how to get one."""
    program = find_server()
    need_service("s3", None if program else "no weed (SeaweedFS) here", start=START)
    return SeaweedServer(program, folder, *flags)


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory):
    """One for all tests that leave it alone."""
    with real(tmp_path_factory.mktemp("weed")) as found:
        yield found


@pytest.fixture
def serve(tmp_path):
    """Start servers of a test's own."""
    with contextlib.ExitStack() as stack:
        yield lambda *flags: stack.enter_context(real(tmp_path, *flags))


@pytest.fixture
def between_it():
    """Put a twist before a server."""
    with contextlib.ExitStack() as stack:
        yield lambda server, twist: stack.enter_context(Between(server, twist)).endpoint


@pytest.fixture
def between(seaweed, between_it):
    """Put a twist before the real server."""
    return lambda twist: between_it(seaweed, twist)


@pytest.fixture(scope="session")
def moto():
    with PretendedServer() as found:
        yield found


@pytest.fixture
def config(seaweed):
    """A part of the bucket that no test used before."""
    return seaweed.config(f"t{next(_numbers)}")


@pytest.fixture(name="eventually")
def _eventually():
    """Await a condition of the outside world."""
    return eventually
