"""Proof of who asks: AWS Signature Version 4 and its two relatives, and the shared key of Azure.

Bodies are not part of the signature: TLS guards them on the way, frame digests in the store.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Protocol
from urllib.parse import quote

Query = Mapping[str, str]
Headers = dict[str, str]
SAFE = "-_.~"


class Signer(Protocol):
    """Adds what the server wants to the headers (lower-case names) of a request and gives its query text."""

    def __call__(self, method: str, path: str, query: Query, headers: Headers, /) -> str: ...


@dataclass(frozen=True, slots=True)
class Keys:
    """One set of credentials."""

    access: str
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Dialect:
    """Words in which the relatives of Signature Version 4 differ."""

    algorithm: str = "AWS4-HMAC-SHA256"
    begin: str = "AWS4"
    end: str = "aws4_request"
    vendor: str = "x-amz"
    service: str = "s3"
    token: str = "x-amz-security-token"


AWS = Dialect()
EXPRESS = Dialect(service="s3express", token="x-amz-s3session-token")
GOOGLE = Dialect("GOOG4-HMAC-SHA256", "GOOG4", "goog4_request", "x-goog", "storage", "")


def encode(query: Query, /) -> str:
    """A query in canonical form."""
    pairs = sorted((quote(k, safe=SAFE), quote(v, safe=SAFE)) for k, v in query.items())
    return "&".join(f"{k}={v}" for k, v in pairs)


class V4:
    """Signature Version 4 and what Google made of it.

    Args:
        keys: the credentials of now.
        wall: seconds since 1970.
    """

    def __init__(
        self,
        region: str,
        keys: Callable[[], Keys],
        wall: Callable[[], float],
        dialect: Dialect = AWS,
    ) -> None:
        self._region = region
        self._keys = keys
        self._wall = wall
        self._dialect = dialect
        self._derived: tuple[tuple[str, str], bytes] = (("", ""), b"")

    def __call__(self, method: str, path: str, query: Query, headers: Headers, /) -> str:
        keys, words = self._keys(), self._dialect
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._wall()))
        headers[f"{words.vendor}-date"] = stamp
        headers[f"{words.vendor}-content-sha256"] = "UNSIGNED-PAYLOAD"
        if keys.token:
            headers[words.token] = keys.token
        # Host, range and the vendor's own; what a proxy may change on the way stays out.
        signed = sorted(n for n in headers if n.startswith(words.vendor) or n in ("host", "range"))
        names, text = ";".join(signed), encode(query)
        lines = [method, path, text, *(f"{n}:{headers[n]}" for n in signed), "", names]
        canonical = "\n".join([*lines, "UNSIGNED-PAYLOAD"])
        scope = f"{stamp[:8]}/{self._region}/{words.service}/{words.end}"
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        message = f"{words.algorithm}\n{stamp}\n{scope}\n{digest}"
        signature = hmac.digest(self._key(keys.secret, stamp[:8]), message.encode(), "sha256").hex()
        headers["authorization"] = (
            f"{words.algorithm} Credential={keys.access}/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        return text

    def _key(self, secret: str, day: str) -> bytes:
        known, key = self._derived
        if known != (secret, day):
            words = self._dialect
            key = f"{words.begin}{secret}".encode()
            for step in (day, self._region, words.service, words.end):
                key = hmac.digest(key, step.encode(), "sha256")
            self._derived = (secret, day), key
        return key


class Bearer:
    """A token in every request."""

    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    def __call__(self, method: str, path: str, query: Query, headers: Headers, /) -> str:
        headers["authorization"] = f"Bearer {self._token()}"
        return encode(query)


class SharedKey:
    """Azure's key of a storage account, or a shared access signature, which is part of the query.

    Raises:
        ValueError: the key is not base64.
    """

    def __init__(self, account: str, key: str, sas: str, wall: Callable[[], float]) -> None:
        self._account = account
        self._key = base64.b64decode(key, validate=True)
        self._sas = sas.removeprefix("?")
        self._wall = wall

    def __call__(self, method: str, path: str, query: Query, headers: Headers, /) -> str:
        headers["x-ms-date"] = formatdate(self._wall(), usegmt=True)
        headers["x-ms-version"] = "2021-08-06"
        text = encode(query)
        if self._sas:
            return f"{text}&{self._sas}" if text else self._sas
        length = headers.get("content-length", "")
        plain = (
            *(
                "content-encoding",
                "content-language",
                "length",
                "content-md5",
                "content-type",
                "date",
            ),
            *("if-modified-since", "if-match", "if-none-match", "if-unmodified-since", "range"),
        )
        known = {**headers, "length": "" if length == "0" else length}
        lines = [method, *(known.get(name, "") for name in plain)]
        lines += [f"{name}:{headers[name]}" for name in sorted(headers) if name.startswith("x-ms-")]
        lines.append(f"/{self._account}{path}")
        lines += [f"{name}:{query[name]}" for name in sorted(query)]
        digest = hmac.digest(self._key, "\n".join(lines).encode(), "sha256")
        headers["authorization"] = f"SharedKey {self._account}:{base64.b64encode(digest).decode()}"
        return text
