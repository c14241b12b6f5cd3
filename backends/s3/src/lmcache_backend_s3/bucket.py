"""Objects in one bucket by name: what S3, and what speaks it, is asked, and how its answers are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from http.client import HTTPResponse
from xml.etree import ElementTree

from lmcache_backend_s3.sign import Signer
from lmcache_backend_s3.transport import DRAIN, Call, Transport, read_into
from lmcache_core.spi import BackendError, Found, Unavailable

FULL = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "NotEntitled"}
TOO_LONG = {"EntityTooLarge", "MaxMessageLengthExceeded"}
FORBIDDEN = {"AccessDenied", "AllAccessDisabled", "AuthorizationPermissionMismatch"}
EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"}
HOPELESS = {
    "NoSuchBucket": "there is no such bucket",
    "ContainerNotFound": "there is no such container",
    "InvalidBucketName": "that is no name of a bucket",
    "InvalidAccessKeyId": "the access key is unknown",
    "SignatureDoesNotMatch": "the secret key is wrong",
    "AuthenticationFailed": "the account key or signature is wrong",
    "InvalidAuthenticationInfo": "the account key or signature is wrong",
    "AuthorizationFailure": "the account key or signature is wrong, or too little is allowed",
    "AuthorizationHeaderMalformed": "the region is wrong",
    "PermanentRedirect": "the region or endpoint is wrong",
    "IllegalLocationConstraintException": "the region is wrong",
    "AccessDenied": "access is denied; list, get, put and delete under the prefix are needed",
    "AllAccessDisabled": "the account is disabled",
    "AuthorizationPermissionMismatch": "access is denied; read, write, delete and list are needed",
}
"""Codes that no other try will change, and what they mean to who configures."""
BUSY = {408, 409, 429, 500, 502, 503, 504}
LISTING_MOST = 64 << 20


class Refused(BackendError):
    """The server declined; ``code`` is its word for why."""

    def __init__(self, status: int, code: str, message: str, region: str, /) -> None:
        text = f"the server said {status} {code}".rstrip()
        super().__init__(f"{text}: {message}" if message else text, retryable=status in BUSY)
        self.status = status
        self.code = code
        self.region = region


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a listing."""

    name: str
    nbytes: int
    etag: str


Choose = Callable[[int, str], Sequence[memoryview]]
"""Where bytes go, given the length of the whole object and its version; may raise a ``BackendError``."""


class Bucket:
    """One bucket of a server that speaks S3.

    Every method raises ``Refused`` for answers that are none of its results, ``Unavailable`` without any.

    Args:
        root: path in front of names, ``/BUCKET`` or empty.
        only_new: header by which a put fails where the name is taken.
    """

    most_keys = 1000

    def __init__(
        self,
        transport: Transport,
        sign: Signer,
        root: str,
        only_new: tuple[str, str] = ("if-none-match", "*"),
        expired: Callable[[], None] = lambda: None,
    ) -> None:
        self._transport = transport
        self._sign = sign
        self._root = root
        self._only_new = only_new
        self._expired = expired

    def head(self, name: str, call: Call, /) -> Found | None:
        """Tell whether an object is there."""
        with self._ask(call, "HEAD", name) as response:
            if response.status == 200:
                length = _length(response.headers.get("content-length"))
                return Found(length, etag=response.headers.get("etag"), promise=False)
            if response.status == 404:
                return None
            raise self.refusal(response)

    def get(
        self,
        name: str,
        call: Call,
        choose: Choose,
        /,
        *,
        offset: int = 0,
        length: int | None = None,
    ) -> int | None:
        """Copy bytes of an object to where ``choose`` says; their number, None where there is none."""
        if length == 0:
            return self._nothing(name, call, choose)
        headers = {}
        if ranged := bool(offset) or length is not None:
            headers["range"] = f"bytes={offset}-{'' if length is None else offset + length - 1}"
        with self._ask(call, "GET", name, headers=headers) as response:
            if response.status in (200, 206):
                if ranged != (response.status == 206):
                    raise Unavailable("the server does not give parts of objects", retryable=False)
                told = response.headers.get("content-range" if ranged else "content-length")
                total = _length((told or "").rpartition("/")[2])
                return read_into(response, choose(total, response.headers.get("etag", "")))
            if response.status == 404:
                refused = self.refusal(response)
                if refused.code in HOPELESS:
                    raise refused
                return None
            if response.status != 416:
                raise self.refusal(response)
        return self._nothing(name, call, choose)

    def put(self, name: str, parts: Sequence[memoryview], call: Call, /, *, only_new: bool) -> bool:
        """Write an object; False where ``only_new`` and the name is taken."""
        headers = dict([self._only_new]) if only_new else {}
        with self._ask(
            call, "PUT", name, headers=self.put_headers(headers), parts=parts
        ) as response:
            if response.status in (200, 201):
                return True
            refused = self.refusal(response)
        if only_new and self.taken(refused):
            return False
        # Two writers of one name at one moment; whoever won, it is there or may be tried again.
        if refused.status == 409 and only_new and self.head(name, call) is not None:
            return False
        raise refused

    def delete(self, name: str, call: Call, /) -> bool:
        """Remove an object; whether it was there. The server does not tell, so it is asked before."""
        if self.head(name, call) is None:
            return False
        with self._ask(call, "DELETE", name) as response:
            if response.status in (200, 202, 204):
                return True
            if response.status == 404:
                return False
            raise self.refusal(response)

    def list(
        self, prefix: str, after: str | None, limit: int, call: Call, /
    ) -> tuple[list[Entry], str | None]:
        """Names under a prefix, at most ``limit`` of them, and what continues the listing."""
        query = {"list-type": "2", "prefix": prefix, "max-keys": str(min(limit, self.most_keys))}
        if after is not None:
            query["continuation-token"] = after
        tree = self.document(call, query)
        found = [
            Entry(text(one, "Key"), int(text(one, "Size")), text(one, "ETag"))
            for one in tree.findall("{*}Contents")
        ]
        more = text(tree, "NextContinuationToken") if text(tree, "IsTruncated") == "true" else ""
        return found, more or None

    def make(self, call: Call, query: Mapping[str, str] | None = None, /) -> bool:
        """Make the bucket itself, as test servers need it; False where it is there."""
        with self._ask(call, "PUT", "", query or {}) as response:
            if response.status in (200, 201):
                return True
            if response.status == 409:
                return False
            raise self.refusal(response)

    # -- objects in parts ------------------------------------------------------------------------------

    def begin_parts(self, name: str, call: Call, /) -> str:
        """Begin to write an object in parts; what names the attempt."""
        with self._ask(call, "POST", name, {"uploads": ""}) as response:
            if response.status == 200:
                return text(parse(response), "UploadId")
            raise self.refusal(response)

    def put_part(
        self, name: str, upload: str, number: int, parts: Sequence[memoryview], call: Call, /
    ) -> str:
        """Write one part, numbered from 1; its version."""
        query = {"partNumber": str(number), "uploadId": upload}
        with self._ask(call, "PUT", name, query, parts=parts) as response:
            if response.status == 200:
                return str(response.headers["etag"])
            raise self.refusal(response)

    def join_parts(
        self, name: str, upload: str, etags: Sequence[str], call: Call, /, *, only_new: bool
    ) -> bool:
        """Make the object visible; False where ``only_new`` and the name is taken."""
        rows = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>"
            for number, etag in enumerate(etags, 1)
        )
        body = f"<CompleteMultipartUpload>{rows}</CompleteMultipartUpload>".encode()
        headers = {
            "content-type": "application/xml",
            **(dict([self._only_new]) if only_new else {}),
        }
        query = {"uploadId": upload}
        with self._ask(call, "POST", name, query, headers, [memoryview(body)]) as response:
            refused = self.refusal(response)  # an error may come after a status of 200
            if response.status == 200 and not refused.code:
                return True
        if only_new and self.taken(refused):
            return False
        raise refused

    def drop_parts(self, name: str, upload: str, call: Call, /) -> None:
        """Forget an attempt."""
        with self._ask(call, "DELETE", name, {"uploadId": upload}) as response:
            if response.status not in (204, 404):
                raise self.refusal(response)

    # -- words that differ -----------------------------------------------------------------------------

    def put_headers(self, headers: dict[str, str]) -> dict[str, str]:
        """What a put says besides."""
        return headers

    def taken(self, refused: Refused) -> bool:
        """Whether a conditional write was declined because the name is taken."""
        return refused.status == 412

    def refusal(self, response: HTTPResponse) -> Refused:
        """The answer as an error; reads the body."""
        body = response.read(DRAIN).decode(errors="replace")
        code, message, region = (_tag(body, name) for name in ("Code", "Message", "Region"))
        code = response.headers.get("x-ms-error-code") or code
        if code in EXPIRED:
            self._expired()
        region = response.headers.get("x-amz-bucket-region") or region
        return Refused(response.status, code, " ".join(message.split())[:200].lower(), region)

    def document(self, call: Call, query: Mapping[str, str]) -> ElementTree.Element:
        """Ask the bucket itself."""
        with self._ask(call, "GET", "", query) as response:
            if response.status == 200:
                return parse(response)
            raise self.refusal(response)

    def _nothing(self, name: str, call: Call, choose: Choose) -> int | None:
        """Answer a load that can take no byte: ``choose`` finds what is wrong with it, if anything is."""
        found = self.head(name, call)
        if found is None:
            return None
        if any(view.nbytes for view in choose(found.nbytes, found.etag or "")):
            raise Unavailable("the object changed while it was read")
        return 0

    def _ask(
        self,
        call: Call,
        method: str,
        name: str,
        query: Mapping[str, str] = {},
        headers: Mapping[str, str] = {},
        parts: Sequence[memoryview] = (),
    ) -> AbstractContextManager[HTTPResponse]:
        path = f"{self._root}/{name}" if name else self._root or "/"
        sent = {"host": self._transport.authority, **headers}
        if method in ("PUT", "POST"):
            sent["content-length"] = str(sum(part.nbytes for part in parts))
        text = self._sign(method, path, query, sent)
        return self._transport.exchange(
            call, method, f"{path}?{text}" if text else path, sent, parts
        )


def parse(response: HTTPResponse) -> ElementTree.Element:
    """The document in a body.

    Raises:
        Unavailable: it is none.
    """
    try:
        return ElementTree.fromstring(response.read(LISTING_MOST))
    except ElementTree.ParseError as error:
        raise Unavailable(f"the server's answer is no XML: {error}") from error


def text(element: ElementTree.Element, name: str) -> str:
    """Text of a child, whatever its name space; empty where there is none."""
    return element.findtext(f"{{*}}{name}") or ""


def _length(written: str | None) -> int:
    """A length as a header tells it.

    Raises:
        Unavailable: there is none.
    """
    if written is None or not written.isdecimal():
        raise Unavailable(f"the server tells no length but {written!r}")
    return int(written)


def _tag(body: str, name: str) -> str:
    match = re.search(rf"<{name}>([^<]*)</{name}>", body)
    return match[1] if match else ""
