"""Signatures are those of botocore, which is the reference."""

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmcache_backend_s3 import sign
from lmcache_backend_s3.sign import V4, Keys

botocore_auth = pytest.importorskip("botocore.auth")
STAMP = datetime.datetime(2026, 11, 30, 1, 2, 3, tzinfo=datetime.UTC)
TEXT = st.text("abcXYZ0189-_.~/ +&=%é", min_size=1, max_size=12)


@pytest.mark.parametrize(("dialect", "name"), [(sign.AWS, "S3SigV4Auth"), (sign.EXPRESS, "S3ExpressAuth")])  # fmt: skip
@given(
    method=st.sampled_from(["GET", "PUT", "HEAD", "POST", "DELETE"]),
    query=st.dictionaries(TEXT, TEXT, max_size=3),
    token=st.sampled_from(["", "a-token"]),
    ranged=st.booleans(),
)
def test_signature_is_that_of_botocore(dialect, name, method, query, token, ranged):
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    if name == "S3ExpressAuth" and not token:
        token = "a-session"
    path = "/bucket/a/0123.~-_x"
    headers = {"host": "example.com:8333"} | ({"range": "bytes=0-9"} if ranged else {})
    sent = dict(headers)
    keys = Keys("AK", "SK", token)
    text = V4("eu-west-1", lambda: keys, STAMP.timestamp, dialect)(method, path, query, sent)

    request = AWSRequest(method, f"http://example.com:8333{path}", headers=headers, params=query)
    request.context.update(timestamp="20261130T010203Z", payload_signing_enabled=False)
    credentials = Credentials("AK", "SK", token or None)
    more = {"identity_cache": None} if name == "S3ExpressAuth" else {}
    signer = getattr(botocore_auth, name)(credentials, dialect.service, "eu-west-1", **more)
    request.context["client_config"] = None
    request.headers["X-Amz-Date"] = "20261130T010203Z"
    request.headers["X-Amz-Content-SHA256"] = "UNSIGNED-PAYLOAD"
    if token:
        request.headers[dialect.token] = token
    canonical = signer.canonical_request(request)
    to_sign = signer.string_to_sign(request, canonical)
    assert sent["authorization"].rpartition("=")[2] == signer.signature(to_sign, request)
    assert text == signer.canonical_query_string(request)
