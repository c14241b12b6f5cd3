"""The other providers: the laws on Azure's emulator where it is installed (CI does not promise it), and what is sent."""

import base64
import dataclasses
import datetime
import hmac
import itertools
import json
import re
from urllib.parse import urlencode

import pytest
from lmcache_backend_s3 import AzBackend, GSBackend
from lmcache_backend_s3.config import AzConfig, GSConfig, S3Config
from lmcache_backend_s3.transport import Call

from lmcache_core.spi import ConfigError, Secret, StoreStatus, Unavailable
from lmcache_core.testing.backend import BackendTests
from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.testing.services import Serving, find_program, free_port, need_service

_numbers = itertools.count()
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Published: every emulator has this account and this key."""


class Azurite(Serving):
    """Microsoft's emulator of Azure Blob Storage."""

    def __init__(self, folder):
        self.port = free_port()
        program = find_program("azurite-blob")
        need_service(
            "azurite", None if program else "no azurite-blob here", start="npm install -g azurite"
        )
        command = [
            program, "--silent", "--skipApiVersionCheck",
            "--disableTelemetry", "--location", str(folder), "--blobHost", "127.0.0.1", "--blobPort", str(self.port),
        ]  # fmt: skip
        super().__init__(command, folder=folder)

    def config(self, prefix):
        return AzConfig(
            url=f"az://kvb/{prefix}", endpoint=f"http://127.0.0.1:{self.port}", account=ACCOUNT, account_key=Secret(KEY)
        )  # fmt: skip

    def ready(self):
        transport, container = AzBackend(self.config(""), real_context()).make_bucket()
        try:
            container.make(Call(), {"restype": "container"})
            return True
        except Unavailable:
            return False
        finally:
            transport.close()


@pytest.fixture(scope="module")
def azurite(tmp_path_factory):
    with Azurite(tmp_path_factory.mktemp("emulator")) as found:
        yield found


class TestAzure(BackendTests):
    plugin = "az"

    @pytest.fixture(autouse=True)
    def _server(self, azurite):
        self.server = azurite

    def make_backend(self):
        self.backend = AzBackend(self.server.config(f"kit{next(_numbers)}"), real_context())
        return self.backend

    def reopen(self, store):
        return AzBackend(store.config, real_context())

    crash = reopen

    def peek(self, key):
        got = bytearray(999)
        name = self.backend.name(key)
        found = self.backend.bucket.get(name, Call(), lambda total, _: [memoryview(got)[:total]])
        return None if found is None else bytes(got[:found])

    def poke(self, key, value):
        name = self.backend.name(key)
        self.backend.bucket.put(name, [memoryview(value)], Call(), only_new=False)

    def damage(self, key):
        self.poke(key, b"other")


def account_signature():
    """A shared access signature for everything in the emulator's account, for an hour."""
    end = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)).strftime(
        "%Y-%m-%dT%H:%M:%SZ"
    )
    said = {
        "sp": "rwdlc",
        "ss": "b",
        "srt": "sco",
        "st": "",
        "se": end,
        "sip": "",
        "spr": "",
        "sv": "2021-08-06",
        "ses": "",
    }
    text = "\n".join([ACCOUNT, *said.values(), ""])
    digest = hmac.digest(base64.b64decode(KEY), text.encode(), "sha256")
    return urlencode(
        {k: v for k, v in said.items() if v} | {"sig": base64.b64encode(digest).decode()}
    )


def test_azure_takes_a_shared_access_signature_and_refuses_another(azurite, tier, drive):
    config = azurite.config("sas")
    with_sas = {"account_key": Secret("")}

    async def main():
        sas = account_signature()
        async with tier(config, AzBackend, sas_token=Secret(sas), **with_sas) as rig:
            await rig.keep(1)
            assert (await rig.put(1)).status is StoreStatus.PRESENT
            assert await rig.has(1)
        wrong = (
            {"sas_token": Secret(sas.replace("sig=", "sig=A")), **with_sas},
            {"account_key": Secret(base64.b64encode(b"another key").decode())},
        )
        for options in wrong:
            with pytest.raises(ConfigError, match="account key or signature is wrong"):
                async with tier(config, AzBackend, **options):
                    pass
        with pytest.raises(ConfigError, match="no such container"):
            async with tier(dataclasses.replace(config, url="az://another"), AzBackend):
                pass

    drive(main())


def test_google_is_asked_in_its_own_words(moto, tier, drive, between_it):
    """No emulator here speaks Google's XML interface: what is sent is looked at, and a pretended S3 answers."""
    seen = []

    def twist(request):
        seen.append(dict(request.headers))
        request.headers.replace_header("authorization", "Bearer x")
        if request.headers["x-goog-if-generation-match"] == "0":
            request.headers["if-none-match"] = "*"

    config = GSConfig(
        url="gs://lmcache/g", endpoint=between_it(moto, twist), access_key=Secret("an-id"), secret_key=Secret("s")
    )  # fmt: skip

    async def main():
        async with tier(config, GSBackend) as rig:
            await rig.keep(1, 2)
            assert (await rig.put(1)).status is StoreStatus.PRESENT
            assert await rig.has(1, 2)
            assert len((await rig.backend.scan()).values) == 2
            assert await rig.backend.delete([rig.key(1)]) == 1
        pattern = r"GOOG4-HMAC-SHA256 Credential=an-id/\d{8}/auto/storage/goog4_request, SignedHeaders=host;"
        assert all(re.match(pattern, headers["authorization"]) for headers in seen)
        assert not any(name.startswith("x-amz") for headers in seen for name in headers)

    drive(main())


def test_google_tokens_come_from_the_metadata_service(moto, tier, drive, between_it, monkeypatch):
    def metadata(request):
        assert request.headers["metadata-flavor"] == "Google"
        return 200, {}, json.dumps({"access_token": "tok", "expires_in": 3599}).encode()

    seen = []

    def twist(request):
        seen.append(request.headers["authorization"])

    host = between_it(moto, metadata).partition("://")[2]
    monkeypatch.setenv("GCE_METADATA_HOST", host)

    async def main():
        config = GSConfig(url="gs://lmcache/m", endpoint=between_it(moto, twist))
        async with tier(config, GSBackend) as rig:
            await rig.keep(1)
        assert set(seen) == {"Bearer tok"}
        monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
        with pytest.raises(Unavailable, match="no token"):
            async with tier(config, GSBackend):
                pass

    drive(main())


def test_sessions_with_a_directory_bucket_are_made_and_used(moto, tier, drive, between_it):
    """No server here knows S3 Express: what is sent is looked at, and a pretended S3 answers."""
    seen = []
    session = (
        b"<CreateSessionResult><Credentials><SessionToken>tok</SessionToken><SecretAccessKey>ss</SecretAccessKey>"
        b"<AccessKeyId>session-id</AccessKeyId></Credentials></CreateSessionResult>"
    )

    def twist(request):
        seen.append(
            (
                request.path,
                request.headers["x-amz-s3session-token"],
                request.headers["authorization"],
            )
        )
        if request.path.endswith("?session="):
            return 200, {}, session
        request.path = request.path.replace("/kv--use1-az4--x-s3", "/lmcache")
        return None

    config = S3Config(
        url="s3://kv--use1-az4--x-s3/e", endpoint=between_it(moto, twist), access_key=Secret("long-id"), secret_key=Secret("s")
    )  # fmt: skip

    async def main():
        async with tier(config) as rig:
            await rig.keep(1)
            assert await rig.has(1)

    drive(main())
    (path, token, proof), *rest = seen
    assert (path, token) == ("/kv--use1-az4--x-s3?session=", None)
    assert "Credential=long-id/" in proof
    for _, token, proof in rest:
        assert token == "tok"
        assert re.search("Credential=session-id/[0-9]+/us-east-1/s3express/aws4_request", proof)
