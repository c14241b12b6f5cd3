"""Who may ask what: token, Host and Origin, on a real port and for peers of other machines."""

import asyncio
import os
import socket
import stat

import pytest
from lmcache_server.http.guard import Guard, make_token

from lmcache_core.spi import ConfigError
from tests.wire.daemons import key


def test_token_file_is_this_users_and_new_at_every_start(tmp_path):
    path = str(tmp_path / "token")
    first, second = make_token(path), make_token(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert first != second
    with open(path) as file:
        assert file.read().strip() == second.reveal()
    assert second.reveal() not in repr(second)
    with pytest.raises(ConfigError, match="no token can be written"):
        make_token(str(tmp_path / "missing" / "token"))


def mutating(schema):
    for path, verbs in schema["paths"].items():
        for verb in verbs:
            if verb not in ("get", "head", "options"):
                yield verb.upper(), path.replace("{", "").replace("}", "")


def test_every_route_that_changes_something_needs_the_token(web, operator, stored):
    """Seen in LMCache#2757."""
    routes = list(mutating(web.ask("GET", "/openapi.json", token=False)[2]))
    assert len(routes) >= 12
    for method, path in routes:
        for token in (False, "wrong", ""):
            status, headers, _ = web.ask(method, path, {}, token=token)
            assert status == 401, (method, path)
            assert headers["www-authenticate"] == "Bearer"
    assert (
        web.ask("POST", "/cache/clear", {}, Authorization=f"Basic {web.token}", token=False)[0]
        == 401
    )
    assert None not in operator.find([key(1)]).where
    assert operator.find([key(1)]).where != [-1]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "", "localhost.evil.example", "[::1"]
)
def test_a_name_that_somebody_pointed_here_is_refused(web, host):
    assert web.ask("GET", "/status", token=True, Host=host)[0] in (400, 403)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:99", "127.0.0.1:8080", "[::1]:80", "10.0.0.7"]
)
def test_this_machine_and_addresses_are_names_enough(web, host):
    assert web.ask("GET", "/live", token=False, Host=host)[0] == 200


def test_a_page_of_another_site_is_refused_even_with_the_token(web):
    for origin in ("http://evil.example", "null", "https://127.0.0.1"):
        assert web.ask("POST", "/cache/clear", {}, Origin=origin)[0] == 403
    own = f"http://127.0.0.1:{web.port}"
    assert web.ask("POST", "/flush", {}, Origin=own, Host=own[7:])[0] == 200


def test_a_long_body_is_refused_before_it_is_read(web):
    status, _, body = web.ask("POST", "/cache/clear", {}, **{"Content-Length": str(1 << 40)})
    assert status == 413, body


def test_a_body_of_unsaid_length_is_refused_before_it_is_read(web):
    with socket.create_connection(("127.0.0.1", web.port), timeout=20) as sock:
        head = (
            "POST /cache/clear HTTP/1.1", f"Host: 127.0.0.1:{web.port}",
            f"Authorization: Bearer {web.token}", "Transfer-Encoding: chunked", "", "",
        )  # fmt: skip
        sock.sendall("\r\n".join(head).encode())
        assert sock.recv(1000).startswith(b"HTTP/1.1 411 ")


def ask(guard, *, client, method="GET", headers=()):
    """Status of one request as the server hands it over."""
    said = []

    async def send(message):
        said.append(message)

    sent = [(b"host", b"localhost"), *headers]
    scope = {"type": "http", "method": method, "client": client, "headers": sent}
    asyncio.run(guard(scope, None, send))
    return said[0]["status"]


async def inner(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.mark.parametrize("client", [("10.1.2.3", 5), ("2001:db8::1", 5), ("", 5), None])
def test_other_machines_need_the_token_to_look(tmp_path, client):
    token = make_token(str(tmp_path / "token"))
    guard = Guard(inner, token)
    good = (b"authorization", b"Bearer " + token.reveal().encode())
    assert ask(guard, client=client) == 401
    assert ask(guard, client=client, headers=[(b"x-forwarded-for", b"127.0.0.1")]) == 401
    assert ask(guard, client=client, headers=[good]) == 200
    assert ask(guard, client=("127.0.0.1", 5)) == 200
    assert ask(guard, client=("127.0.0.1", 5), method="POST") == 401


def test_names_are_allowed_by_name(tmp_path):
    token = make_token(str(tmp_path / "token"))

    async def served(scope, receive, send):
        await inner(scope, receive, send)

    guard = Guard(served, token, ("Cache.Internal",))
    named = {"type": "http", "method": "GET", "client": ("127.0.0.1", 1)}
    said = []

    async def send(message):
        said.append(message.get("status"))

    for host in (b"cache.internal:8080", b"other.internal"):
        asyncio.run(guard({**named, "headers": [(b"host", host)]}, None, send))
    assert [status for status in said if status] == [200, 403]
