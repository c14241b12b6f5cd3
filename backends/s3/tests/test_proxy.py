"""An HTTP proxy on the way: plain requests are handed to it, encrypted ones pass through it, and a wrong one is named."""

import base64
import contextlib
import http.client
import select
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from lmcache_core.config import load
from lmcache_core.spi import ConfigError, Secret, Unavailable
from lmcache_core.testing.services import free_port
from tests.wire.certificates import Authority

MIB = 1 << 20
PROOF = "kv:a password"


class Handler(BaseHTTPRequestHandler):
    """Hands requests on, and makes tunnels, to ``server.to`` whatever the name; keeps what it was asked."""

    protocol_version = "HTTP/1.1"

    def handle(self):
        with contextlib.suppress(OSError):
            super().handle()

    def log_message(self, *args):
        pass

    def allowed(self):
        wanted = f"Basic {base64.b64encode(PROOF.encode()).decode()}"
        if self.server.proof and self.headers["proxy-authorization"] != wanted:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response_only(407, "Proxy Authentication Required")
            self.send_header("content-length", "0")
            self.end_headers()
            return False
        return True

    def do_CONNECT(self):
        self.server.asked.append(f"CONNECT {self.path}")
        if not self.allowed():
            return
        self.close_connection = True
        with socket.create_connection(self.server.to) as far:
            self.send_response_only(200)
            self.end_headers()
            ends = {self.connection: far, far: self.connection}
            while ready := select.select(list(ends), [], [], 10.0)[0]:
                for end in ready:
                    if not (some := end.recv(1 << 16)):
                        return
                    ends[end].sendall(some)

    def hand_on(self):
        self.server.asked.append(f"{self.command} {self.path}")
        if not self.allowed():
            return
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        where = urlsplit(self.path)
        assert (where.scheme, where.netloc) == ("http", self.headers["host"])
        assert "authorization" in self.headers
        del self.headers["proxy-authorization"]
        far = http.client.HTTPConnection(*self.server.to, timeout=10)
        far.request(self.command, f"{where.path}?{where.query}", body, dict(self.headers))
        response = far.getresponse()
        content = response.read()
        self.send_response_only(response.status)
        length = {"content-length": str(len(content))}
        for name, text in (length | {k.lower(): v for k, v in response.headers.items()}).items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(content)
        far.close()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = hand_on


class Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port, proof=False):
        super().__init__(("127.0.0.1", 0), Handler)
        self.to, self.proof, self.asked = ("127.0.0.1", port), proof, []
        self.url = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def proxy_to():
    with contextlib.ExitStack() as stack:

        def make(port, **how):
            made = stack.enter_context(Proxy(port, **how))
            stack.callback(made.shutdown)
            threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
            return made

        yield make


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_plain_requests_are_handed_to_the_proxy_which_knows_the_server(
    seaweed, config, tier, drive, proxy_to
):
    proxy = proxy_to(seaweed.port, proof=True)
    how = {"endpoint": "http://objects.invalid:8333", "proxy": proxy.url}

    async def main():
        async with tier(config, **how, proxy_auth=Secret(PROOF)) as rig:
            await rig.keep(1, 2, nbytes=MIB)
            assert await rig.has(1, 2, nbytes=MIB)
        assert any(line.startswith("PUT http://objects.invalid:8333/") for line in proxy.asked)
        with pytest.raises(Unavailable, match=r"407 .*; set proxy_auth") as error:
            async with tier(config, **how):
                pass
        assert "\n" not in str(error.value)

    drive(main())


@pytest.mark.slow
def test_encrypted_connections_pass_through_the_proxy_unread(
    serve, tier, drive, proxy_to, tmp_path
):
    authority = Authority(tmp_path)
    crt, key = authority.issue("objects.invalid")
    port = free_port()
    server = serve(f"-s3.port.https={port}", f"-s3.cert.file={crt}", f"-s3.key.file={key}")
    proxy = proxy_to(port, proof=True)
    how = {"endpoint": "https://objects.invalid", "ca_file": authority.file, "proxy": proxy.url}

    async def main():
        async with tier(server.config(), **how, proxy_auth=Secret(PROOF)) as rig:
            await rig.keep(1, nbytes=3 * MIB)
            assert await rig.has(1, nbytes=3 * MIB)
        assert set(proxy.asked) == {"CONNECT objects.invalid:443"}
        with pytest.raises(Unavailable, match=r"through to objects\.invalid:443: 407"):
            async with tier(server.config(), **how):
                pass

    drive(main())


def test_environment_names_the_proxy_and_whom_it_is_not_for(
    seaweed, config, tier, drive, proxy_to, monkeypatch
):
    proxy = proxy_to(seaweed.port, proof=True)
    monkeypatch.setenv("HTTP_PROXY", proxy.url.replace("//", "//kv:a%20password@"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,.example")

    async def main():
        for endpoint, passed in (("http://objects.invalid:8333", True), (config.endpoint, False)):
            del proxy.asked[:]
            async with tier(config, proxy="environment", endpoint=endpoint) as rig:
                await rig.put(1)
                assert await rig.has(1)
            assert bool(proxy.asked) is passed
        monkeypatch.delenv("NO_PROXY")
        del proxy.asked[:]
        async with tier(config, proxy="off") as rig:
            assert await rig.has(1)
        assert not proxy.asked
        for impossible in ("socks5://127.0.0.1:1080", "http://127.0.0.1:99999"):
            monkeypatch.setenv("HTTP_PROXY", impossible)
            with pytest.raises(ConfigError, match="http_proxy of the environment is not"):
                async with tier(config, proxy="environment"):
                    pass

    drive(main())


def test_wrong_proxy_is_named_in_one_line(seaweed, config, tier, drive):
    async def main():
        for proxy, words in (
            ("http://127.0.0.1:9", "cannot connect to proxy 127.0.0.1:9: "),
            ("http://proxy.invalid:3128", "cannot find proxy proxy.invalid:3128: "),
        ):
            for scheme in ("http", "https"):
                with pytest.raises(Unavailable, match=words) as error:
                    async with tier(config, proxy=proxy, endpoint=f"{scheme}://objects.invalid"):
                        pass
                assert "\n" not in str(error.value)
        # A server that is no proxy.
        with pytest.raises(Unavailable, match=f"proxy 127.0.0.1:{seaweed.port} "):
            async with tier(config, proxy=seaweed.endpoint, endpoint="https://objects.invalid"):
                pass

    drive(main())


def test_proxy_that_cannot_be_is_refused_when_it_is_read():
    for proxy in ("https://p:1", "p:3128", "http://u:secret@p:1", "http://p"):
        s3 = {"url": "s3://kvb", "proxy": proxy}
        with pytest.raises(ConfigError, match="proxy is neither http://HOST:PORT") as error:
            load(env={}, flags={"tiers": [{"cpu": {"size": "1GiB"}}, {"s3": s3}]})
        assert "secret" not in str(error.value)
