"""Who may ask what over HTTP, decided before anything of a request's body is read."""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import secrets
import tempfile
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from lmcache_core.spi import ConfigError, Secret

_READING = ("GET", "HEAD", "OPTIONS")
_MOST_BODY = 4 << 20


class Guard:
    """Checks Host and Origin of every request, and the token of those that change something or come from afar.

    A web page can make a browser send requests to this machine, under a name that its owner points here:
    so names other than ``localhost`` and ``hosts`` are refused (addresses cannot be pointed elsewhere), and
    so is any foreign Origin. The peer's own address counts; headers of proxies are not believed.
    """

    def __init__(self, app: ASGIApp, token: Secret, hosts: tuple[str, ...] = ()) -> None:
        self._app = app
        self._token = token.reveal().encode()
        self._hosts = ("localhost", *map(str.lower, hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            await _refuse(send, *refusal)
        elif scope["type"] in ("http", "lifespan"):
            await self._app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        host = headers.get("host", "")
        if not self._named(host):
            return 403, "this Host is not served here; --allow-host NAME allows it"
        if "origin" in headers and headers["origin"] not in (f"http://{host}", f"https://{host}"):
            return 403, "requests of other sites are refused"
        far = not _is_loopback((scope.get("client") or ("",))[0])
        if (far or scope["method"] not in _READING) and not self._authorized(headers):
            return 401, "the token is needed: Authorization: Bearer TOKEN"
        if "transfer-encoding" in headers:
            return 411, "a body comes with its length"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > _MOST_BODY:
            return 413, f"a body has at most {_MOST_BODY} bytes"
        return None

    def _named(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self._hosts or _is_address(name)

    def _authorized(self, headers: Mapping[str, str]) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        good = hmac.compare_digest(given.strip().encode("latin-1"), self._token)
        return good and scheme.lower() == "bearer"


async def _refuse(send: Send, status: int, text: str) -> None:
    body = json.dumps({"detail": text}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(peer: str) -> bool:
    return _is_address(peer) and ipaddress.ip_address(peer).is_loopback


def make_token(path: str, /) -> Secret:
    """A new token in a file that only this user can read; replaces one of an earlier start."""
    token = secrets.token_urlsafe(32)
    try:
        descriptor, fresh = tempfile.mkstemp(dir=os.path.dirname(path) or ".", prefix=".token-")
        with os.fdopen(descriptor, "w") as file:
            file.write(token + "\n")
        os.replace(fresh, path)
    except OSError as error:
        raise ConfigError(f"no token can be written to {path}: {error.strerror}") from error
    return Secret(token)
