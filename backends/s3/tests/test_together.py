"""One bucket below several caches: hits are shared, and what is damaged there is a miss that heals."""

import asyncio
import json

import pytest
from lmcache_backend_s3.transport import Call

from lmcache_core.registry import Registry
from lmcache_core.storage import Reason
from lmcache_core.storage.build import build
from lmcache_core.testing.worlds import below, key_of, plain_frame, put, served
from tests.wire.daemons import Daemon, fill, key, value

NBYTES = 50_001
CHUNKS = [key_of(number) for number in range(12)]


def test_what_one_cache_stores_another_serves(config, drive):
    async def main():
        first, second = [
            await build(below("s3", config, deadline=5.0), Registry()) for _ in range(2)
        ]
        assert all(put(first, CHUNKS, NBYTES))
        await first.flush()
        assert (await second.lookup(CHUNKS)).leading == len(CHUNKS)
        assert await served(second, CHUNKS) == (len(CHUNKS), Reason.COMPLETE)
        for manager in (first, second):
            manager.check()
            await manager.aclose()

    drive(main())


@pytest.mark.parametrize(
    "spoiled",
    [
        pytest.param(lambda: plain_frame(CHUNKS[9], NBYTES), id="another key's value"),
        pytest.param(lambda: b"garbage" * 5000, id="garbage"),
        pytest.param(lambda: b"", id="nothing"),
        pytest.param(lambda: plain_frame(CHUNKS[3], NBYTES)[:-9] + b"flipped!?", id="flipped"),
    ],
)
def test_damage_is_a_miss_and_is_stored_anew(seaweed, config, drive, eventually, spoiled):
    bucket = seaweed.bucket()

    async def main():
        first = await build(below("s3", config, deadline=5.0), Registry())
        assert all(put(first, CHUNKS[:5], NBYTES))
        await first.flush()
        await first.aclose()
        name = f"{config.prefix}{CHUNKS[3].digest.hex()[:3]}/{CHUNKS[3].text}"
        assert bucket.head(name, Call()) is not None
        bucket.put(name, [memoryview(spoiled())], Call(), only_new=False)
        second = await build(below("s3", config, deadline=5.0), Registry())
        assert (await served(second, CHUNKS[:5]))[0] == 3

        async def removed():
            return not second.tiers[0].bad and bucket.head(name, Call()) is None

        await eventually(removed)
        assert all(put(second, CHUNKS[3:4], NBYTES))
        await second.flush()
        third = await build(below("s3", config, deadline=5.0), Registry())
        assert await served(third, CHUNKS[:5]) == (5, Reason.COMPLETE)
        for manager in (second, third):
            manager.check()
            await manager.aclose()

    drive(main())


@pytest.mark.slow
def test_hanging_server_costs_no_more_than_the_deadline(serve, drive, eventually):
    server = serve()

    async def main():
        first = await build(below("s3", server.config(), deadline=2.0), Registry())
        assert all(put(first, CHUNKS, NBYTES))
        await first.flush()
        other = await build(below("s3", server.config(), deadline=0.2), Registry())
        server.suspend()
        loop = asyncio.get_running_loop()
        for _ in range(8):
            began = loop.time()
            assert (await other.lookup(CHUNKS)).leading == 0
            assert loop.time() - began < 0.7
        server.resume()

        async def back():
            return (await other.lookup(CHUNKS)).leading == len(CHUNKS)

        await eventually(back)
        for one in (first, other):
            one.check()
            await one.aclose()

    drive(main())


@pytest.mark.slow
def test_two_daemons_on_one_bucket_share_hits(config, tmp_path):
    written = tmp_path / "kv.yaml"
    s3 = {"url": config.url, "endpoint": config.endpoint, "deadline": "10s"}
    s3 |= {
        "access_key": config.access_key.reveal(),
        "secret_key": config.secret_key.reveal(),
    }
    tiers = [{"cpu": {"size": "64MiB"}}, {"s3": s3}]
    written.write_text(json.dumps({"tiers": tiers, "manager": {"cost_gate": False}}))
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    flags = ("--config", str(written), "--arena-mode", "shared-rw")
    with Daemon(folders[0], *flags) as one, Daemon(folders[1], *flags) as two:
        first, second = one.client(timeout=5), two.client(timeout=5)
        numbers = range(6)
        held = first.reserve([(key(n), 65536 + 4096) for n in numbers], None)
        identities = [fill(each, n) for each, n in zip(held, numbers, strict=True)]
        assert all(first.commit_batch(held, identities))
        first.flush()
        loaded = second.load([key(n) for n in numbers], None)
        assert [bytes(lease.view[4096:]) for lease in loaded.leases] == [value(n) for n in numbers]
        second.release(loaded.leases)
        first.close()
        second.close()
