"""Both ends of the wire: encryption, a client that dies while it writes, idle connections."""

import subprocess
import sys
import time

import pytest
from lmcache_backend_s3.transport import Call

from lmcache_core.spi import ConfigError, LoadStatus, Unavailable
from lmcache_core.testing.services import free_port
from tests.wire.certificates import Authority

MIB = 1 << 20


@pytest.mark.slow
def test_encrypted_connection_carries_values_and_refuses_a_stranger(serve, tier, drive, tmp_path):
    authority = Authority(tmp_path)
    crt, key = authority.issue()
    port = free_port()
    server = serve(f"-s3.port.https={port}", f"-s3.cert.file={crt}", f"-s3.key.file={key}")
    endpoint = f"https://127.0.0.1:{port}"

    async def main():
        async with tier(
            server.config(), endpoint=endpoint, ca_file=authority.file, timeout=5.0
        ) as rig:
            await rig.keep(1, 2, nbytes=3 * MIB + 7)
            assert await rig.has(1, 2, nbytes=3 * MIB + 7)
            server.suspend()
            now = rig.backend.context.clock.now
            loaded, _ = await rig.get(1, 4 * MIB, deadline=now() + 0.1)
            assert "deadline" in str(loaded.error)
            server.resume()
            assert await rig.has(1, nbytes=3 * MIB + 7)
        with pytest.raises(Unavailable, match="certificate verify failed"):
            async with tier(server.config(), endpoint=endpoint):
                pass
        with pytest.raises(ConfigError, match="ca_file /nowhere"):
            async with tier(server.config(), endpoint=endpoint, ca_file="/nowhere"):
                pass

    drive(main())


WRITER = """
import asyncio, os, sys
from lmcache_backend_s3 import S3Backend
from lmcache_backend_s3.config import S3Config
from lmcache_core.spi import Key, Secret, Store
from lmcache_core.testing.contexts import test_context
url, endpoint, access, secret = sys.argv[1:]
config = S3Config(url=url, endpoint=endpoint, access_key=Secret(access), secret_key=Secret(secret), threads=4)
async def main():
    backend = S3Backend(config, test_context())
    await backend.open()
    print("ready", flush=True)
    value = memoryview(b"v" * 300_000)
    while True:
        await backend.store([Store(Key(os.urandom(32), os.urandom(32)), (value,)) for _ in range(8)])
asyncio.run(main())
"""


@pytest.mark.slow
def test_writer_that_is_killed_leaves_no_value_in_part(seaweed, config):
    secrets = config.access_key.reveal(), config.secret_key.reveal()
    for number in range(6):
        command = [sys.executable, "-c", WRITER, config.url, config.endpoint, *secrets]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(0.05 + 0.013 * number)  # a moment of its writing, another one each time
            writer.kill()
    bucket = seaweed.bucket()
    names, after = [], ""
    while after is not None:
        entries, after = bucket.list(config.prefix, after or None, 1000, Call())
        names += [entry for entry in entries if "/probe-" not in entry.name]
    assert len(names) > 20
    assert {entry.nbytes for entry in names} == {300_000}


def test_connection_that_was_idle_too_long_or_closed_is_made_anew(config, tier, drive, between):
    served = []

    def twist(request):
        served.append(request.client_address)
        if len(served) % 3 == 0:
            request.close_connection = True  # without telling, as servers do after a while

    async def main():
        async with tier(config, endpoint=between(twist)) as rig:
            await rig.keep(*range(5))
            assert await rig.has(*range(5))
            loaded, _ = await rig.get(9)
            assert loaded.status is LoadStatus.MISSED
        assert len(set(served)) > 3

    drive(main())
