"""A real server that dies, hangs, fills up or refuses: misses and refusals, and it is found again."""

import asyncio
import dataclasses
import itertools
import json
import urllib.request

import pytest

from lmcache_core.spi import (
    ConfigError,
    Load,
    LoadStatus,
    Secret,
    Store,
    StoreStatus,
    Unavailable,
)
from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.testing.services import free_port
from lmcache_core.wrappers import Retry, RetryOptions

MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["load", "store"])
def test_server_killed_in_the_middle_of_a_batch_is_found_again(
    serve, tier, drive, eventually, verb
):
    server = serve()

    async def main():
        async with tier(server.config(), threads=2) as rig:
            numbers = range(16)
            if verb == "load":
                await rig.keep(*numbers, nbytes=2 * MIB)
            buffers = [bytearray(rig.value(n, 2 * MIB)) for n in numbers]
            items = [
                Load(rig.key(n), (memoryview(b),)) if verb == "load" else Store(rig.key(n), (memoryview(b),))
                for n, b in zip(numbers, buffers, strict=True)
            ]  # fmt: skip
            ended = []

            def done(at, result):
                ended.append(result)
                if len(ended) == 3:
                    server.kill()

            results = await getattr(rig.backend, verb)(items, done=done)
            bad = [
                one for one in results
                if one.status not in (LoadStatus.FILLED, StoreStatus.STORED)
            ]  # fmt: skip
            assert 0 < len(bad) <= 13
            assert all(one.error.retryable for one in bad)
            with pytest.raises(Unavailable):
                await rig.backend.lookup([rig.key(1)])
            server.start()
            loaded = got = None
            for number, result in zip(numbers, results, strict=True):
                # What was acknowledged is there, and nothing is there in part.
                async def answered(number=number):
                    nonlocal loaded, got
                    loaded, got = await rig.get(number, 2 * MIB)
                    return loaded.status is not LoadStatus.FAILED

                await eventually(answered)  # its volumes come back one after another
                if result not in bad:
                    assert loaded.status is LoadStatus.FILLED
                if loaded.status is LoadStatus.FILLED:
                    assert got == rig.value(number, 2 * MIB)

    drive(main())


@pytest.mark.slow
def test_hanging_server_holds_nobody(serve, tier, drive):
    server = serve()

    async def main():
        loop = asyncio.get_running_loop()
        async with tier(server.config(), timeout=30.0) as rig:
            await rig.keep(1, 2, nbytes=MIB)
            server.suspend()
            for call in (rig.get(1, MIB), rig.put(3, 8 * MIB), rig.backend.lookup([rig.key(1)])):
                began = loop.time()
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(call, 0.1)
                assert loop.time() - began < 1.0, "a caller that left was held"
            now = rig.backend.context.clock.now
            loaded, _ = await rig.get(1, MIB, deadline=now() + 0.1)
            assert isinstance(loaded.error, Unavailable)
            assert "deadline" in str(loaded.error)
            stays = asyncio.ensure_future(rig.get(1, MIB))
            leaves = asyncio.ensure_future(rig.get(2, MIB))
            await asyncio.sleep(0.05)
            leaves.cancel()
            await asyncio.wait([leaves])
            server.resume()
            loaded, got = await stays
            assert (loaded.status, got) == (LoadStatus.FILLED, rig.value(1, MIB)), "others go on"
            assert await rig.has(1, 2, nbytes=MIB)
        async with tier(server.config(), timeout=0.2) as rig:
            server.suspend()
            began = loop.time()
            with pytest.raises(Unavailable, match="no answer in time"):
                await rig.backend.lookup([rig.key(1)])
            assert loop.time() - began < 1.0
            closing = loop.time()
        assert loop.time() - closing < 1.0, "close was held"

    drive(main())


FULL = "full: the server said 500 InternalError"


@pytest.mark.slow
def test_full_server_refuses_serves_loads_and_is_used_again_when_it_has_room(
    serve, tier, drive, eventually, between_it
):
    port = free_port()
    server = serve("-master.volumeSizeLimitMB=8", "-volume.max=2", f"-master.port={port}")

    def collect():
        urllib.request.urlopen(f"http://127.0.0.1:{port}/vol/vacuum?garbageThreshold=0.01").close()

    asked = []
    endpoint = between_it(server, lambda request: asked.append(request.command))

    async def main():
        async with tier(server.config(), endpoint=endpoint) as rig:
            rig.backend = Retry(RetryOptions(), real_context(), rig.backend)  # as in a chain
            numbers = itertools.count()
            kept = []
            for number in numbers:
                stored = await rig.put(number, MIB)
                if stored.status is not StoreStatus.STORED:
                    break
                kept.append(number)
                assert len(kept) < 40
            assert (stored.status, stored.reason[: len(FULL)]) == (StoreStatus.REFUSED, FULL)
            assert "\n" not in stored.reason
            assert await rig.has(*kept, nbytes=MIB)
            assert await rig.backend.lookup([rig.key(len(kept))]) == [None]
            del asked[:]
            for _ in range(50):
                assert (await rig.put(next(numbers))).status is StoreStatus.REFUSED
            assert len(asked) < 5, "what a full server will not keep is sent to it"
            async with tier(server.config()) as late:
                assert await late.has(*kept, nbytes=MIB)
            for number in kept[4:]:
                assert await rig.backend.delete([rig.key(number)]) == 1

            async def room():
                await asyncio.to_thread(collect)  # as it does by itself after a while
                return (await rig.put(next(numbers), MIB)).status is StoreStatus.STORED

            await eventually(room)
            assert await rig.has(*kept[:4], nbytes=MIB)

    drive(main())


def test_wrong_place_or_proof_is_refused_at_the_start_in_one_line(seaweed, tier, drive):
    right = seaweed.config()
    wrong = {
        "the secret key is wrong": {"secret_key": Secret("not-it")},
        "the access key is unknown": {"access_key": Secret("nobody")},
        "there is no such bucket": {"url": "s3://another-bucket"},
    }

    async def main():
        for words, options in wrong.items():
            with pytest.raises(ConfigError, match=words) as error:
                async with tier(dataclasses.replace(right, **options)):
                    pass
            assert "\n" not in str(error.value)
            assert "not-it" not in str(error.value)
        with pytest.raises(Unavailable, match="cannot connect"):
            async with tier(dataclasses.replace(right, endpoint="http://127.0.0.1:9")):
                pass

    drive(main())


@pytest.mark.slow
def test_who_may_only_read_loads_and_is_refused_stores(serve, tier, drive, tmp_path):
    names = {"owner": ("o", "os", ["Admin"]), "reader": ("r", "rs", ["Read", "List"])}
    settings = {
        "identities": [
            {"name": n, "credentials": [{"accessKey": a, "secretKey": s}], "actions": may}
            for n, (a, s, may) in names.items()
        ]
    }
    (tmp_path / "s3.json").write_text(json.dumps(settings))
    server = serve(f"-s3.config={tmp_path}/s3.json")

    async def main():
        config = server.config()
        async with tier(config, access_key=Secret("o"), secret_key=Secret("os")) as owner:
            await owner.keep(1)
            async with tier(config, access_key=Secret("r"), secret_key=Secret("rs")) as reader:
                assert await reader.has(1)
                stored = await reader.put(2)
                assert stored.status is StoreStatus.REFUSED
                assert stored.reason.startswith("read-only: the server said 403 AccessDenied")

    drive(main())
