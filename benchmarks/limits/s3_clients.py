"""What other clients of S3 give, each in its best parallel mode: movers of ``benchmarks/tiers.py``.

The values end in the caller's buffers, as a cache needs them: a client that gives them in memory of its own is charged for
the copy. Those that are not installed are left out.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPResponse
from importlib.util import find_spec
from typing import Any

from lmcache_backend_s3.sign import V4, Keys

from lmcache_core.spi import Key

STREAMS = 4


class Parallel:
    """A client on a few threads; subclasses move one value."""

    name = ""
    fills = True

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(STREAMS)

    def put(self, name: str, value: memoryview) -> None: ...
    def get(self, name: str, into: memoryview) -> None: ...
    def delete(self, name: str) -> None: ...

    def store(self, keys: Sequence[Key], values: Sequence[memoryview]) -> None:
        self._all(self.put, keys, values)

    def load(self, keys: Sequence[Key], into: Sequence[memoryview]) -> None:
        self._all(self.get, keys, into)

    def clear(self, keys: Sequence[Key]) -> None:
        self._all(self.delete, keys)

    def close(self) -> None:
        self._threads.shutdown()

    def _all(self, move: Callable[..., None], keys: Sequence[Key], *views: Sequence[Any]) -> None:
        list(self._threads.map(move, [f"raw/{key.text}" for key in keys], *views))


class Boto3(Parallel):
    """``StreamingBody.readinto``; no checksums and no payload signature, as ours."""

    name = "boto3"

    def __init__(self, endpoint: str, bucket: str, access: str, secret: str) -> None:
        super().__init__()
        import boto3
        from botocore.config import Config

        self._bucket = bucket
        needed = {
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        }
        style = {"payload_signing_enabled": False, "addressing_style": "path"}
        self._client = boto3.client(
            "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id=access,
            aws_secret_access_key=secret, config=Config(s3=style, **needed),
        )  # fmt: skip

    def put(self, name: str, value: memoryview) -> None:
        self._client.put_object(Bucket=self._bucket, Key=name, Body=io.BytesIO(value))

    def get(self, name: str, into: memoryview) -> None:
        body, done = self._client.get_object(Bucket=self._bucket, Key=name)["Body"], 0
        while done < into.nbytes:
            done += body.readinto(into[done:])

    def delete(self, name: str) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=name)


class Obstore(Parallel):
    """The Rust client, as a stream of larger pieces: its faster way into a buffer."""

    name = "obstore"

    def __init__(self, endpoint: str, bucket: str, access: str, secret: str) -> None:
        super().__init__()
        import obstore
        from obstore.store import S3Store

        self._module = obstore
        self._store = S3Store(
            bucket, endpoint=endpoint, access_key_id=access, secret_access_key=secret, region="us-east-1",
            client_options={"allow_http": True}, virtual_hosted_style_request=False,
        )  # fmt: skip

    def put(self, name: str, value: memoryview) -> None:
        self._module.put(self._store, name, value, use_multipart=False)

    def get(self, name: str, into: memoryview) -> None:
        at = 0
        for piece in self._module.get(self._store, name).stream(min_chunk_size=1 << 18):
            view = memoryview(piece)
            into[at : at + view.nbytes] = view
            at += view.nbytes

    def delete(self, name: str) -> None:
        self._module.delete(self._store, name)


class Awscrt(Parallel):
    """The C client behind ``aws s3 cp`` and LMCache 0.5.6."""

    name = "awscrt"

    def __init__(self, endpoint: str, bucket: str, access: str, secret: str) -> None:
        super().__init__()
        from awscrt import auth, http, s3
        from awscrt import io as aws_io

        self._http, self._s3, self._bucket = http, s3, bucket
        self._host = endpoint.partition("://")[2]
        group = aws_io.EventLoopGroup(STREAMS)
        bootstrap = aws_io.ClientBootstrap(group, aws_io.DefaultHostResolver(group))
        signing = s3.create_default_s3_signing_config(
            region="us-east-1",
            credential_provider=auth.AwsCredentialsProvider.new_static(access, secret),
        )
        self._client = s3.S3Client(
            bootstrap=bootstrap, region="us-east-1", signing_config=signing,
            tls_mode=s3.S3RequestTlsMode.DISABLED, part_size=16 << 20, throughput_target_gbps=10,
        )  # fmt: skip

    def _ask(
        self, method: str, name: str, kind: Any, body: Any = None, length: int = 0, **more: Any
    ) -> None:
        headers = [("host", self._host)] + ([("content-length", str(length))] if body else [])
        request = self._http.HttpRequest(
            method, f"/{self._bucket}/{name}", self._http.HttpHeaders(headers), body
        )
        self._client.make_request(request=request, type=kind, **more).finished_future.result()

    def put(self, name: str, value: memoryview) -> None:
        self._ask("PUT", name, self._s3.S3RequestType.PUT_OBJECT, io.BytesIO(value), value.nbytes)

    def get(self, name: str, into: memoryview) -> None:
        def piece(chunk: bytes, offset: int, **_: Any) -> None:
            into[offset : offset + len(chunk)] = chunk

        self._ask("GET", name, self._s3.S3RequestType.GET_OBJECT, on_body=piece)

    def delete(self, name: str) -> None:
        kind = self._s3.S3RequestType.DEFAULT
        self._ask("DELETE", name, kind, operation_name="DeleteObject")


class OpenDAL(Parallel):
    """Another Rust client, with a file's ``readinto``."""

    name = "opendal"

    def __init__(self, endpoint: str, bucket: str, access: str, secret: str) -> None:
        super().__init__()
        import opendal

        self._operator = opendal.Operator(
            "s3", endpoint=endpoint, bucket=bucket, access_key_id=access, secret_access_key=secret,
            region="us-east-1", disable_config_load="true",
        )  # fmt: skip

    def put(self, name: str, value: memoryview) -> None:
        self._operator.write(name, bytes(value))  # it takes nothing else

    def get(self, name: str, into: memoryview) -> None:
        with self._operator.open(name, "rb") as file:
            done = 0
            while done < into.nbytes:
                done += file.readinto(into[done:])

    def delete(self, name: str) -> None:
        self._operator.delete(name)


class Plain(Parallel):
    """``http.client`` alone: one connection a thread, requests that are signed, no errors, no limits of time."""

    name = "http.client"

    def __init__(self, endpoint: str, bucket: str, access: str, secret: str) -> None:
        super().__init__()
        self._host = endpoint.partition("://")[2]
        self._bucket = bucket
        keys = Keys(access, secret)
        self._sign = V4("us-east-1", lambda: keys, time.time)
        self._local = threading.local()

    def _ask(self, method: str, name: str, body: memoryview | None = None) -> HTTPResponse:
        path, headers = f"/{self._bucket}/{name}", {"host": self._host}
        if body is not None:
            headers["content-length"] = str(body.nbytes)
        self._sign(method, path, {}, headers)
        connection = self._local.__dict__.setdefault("connection", HTTPConnection(self._host))
        connection.request(method, path, body, headers)
        response: HTTPResponse = connection.getresponse()
        assert response.status in (200, 204), response.status
        return response

    def put(self, name: str, value: memoryview) -> None:
        self._ask("PUT", name, value).read()

    def get(self, name: str, into: memoryview) -> None:
        response, done = self._ask("GET", name), 0
        while done < into.nbytes:
            done += response.readinto(into[done:])
        response.read()

    def delete(self, name: str) -> None:
        self._ask("DELETE", name).read()


def clients(endpoint: str, bucket: str, access: str, secret: str) -> list[Parallel]:
    """Those that are here."""
    kinds = {
        "boto3": Boto3,
        "obstore": Obstore,
        "awscrt": Awscrt,
        "opendal": OpenDAL,
        "http": Plain,
    }
    return [k(endpoint, bucket, access, secret) for n, k in kinds.items() if find_spec(n)]
