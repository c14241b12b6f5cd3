"""One Redis below several caches: hits are shared, and what is damaged there is a miss that heals."""

import asyncio
import json

import pytest
from lmcache_backend_redis.config import RedisConfig

from lmcache_core.registry import Registry
from lmcache_core.storage import Reason
from lmcache_core.storage.build import build
from lmcache_core.testing.worlds import (
    below,
    closed,
    frame_nbytes,
    key_of,
    plain_frame,
    put,
    served,
)
from tests.wire.daemons import Daemon, fill, key, value

NBYTES = 50_001
CHUNKS = [key_of(number) for number in range(20)]


def test_what_one_cache_stores_another_serves(serve, drive):
    server = serve()

    async def main():
        first, second = [
            await build(below("redis", RedisConfig(url=server.url)), Registry()) for _ in range(2)
        ]
        assert all(put(first, CHUNKS, NBYTES))
        await first.flush()
        assert (await second.lookup(CHUNKS)).leading == len(CHUNKS)
        assert await served(second, CHUNKS) == (len(CHUNKS), Reason.COMPLETE)
        await closed(first, second)

    drive(main())


@pytest.mark.parametrize(
    "spoiled",
    [
        pytest.param(lambda: None, id="no string"),
        pytest.param(lambda: plain_frame(CHUNKS[9], NBYTES), id="another key's value"),
        pytest.param(lambda: b"garbage" * 5000, id="garbage"),
        pytest.param(lambda: plain_frame(CHUNKS[3], NBYTES)[:-1], id="a byte short"),
        pytest.param(lambda: plain_frame(CHUNKS[3], NBYTES)[:-9] + b"flipped!?", id="flipped"),
    ],
)
def test_damage_is_a_miss_and_is_stored_anew(serve, drive, eventually, spoiled):
    server = serve()

    async def main():
        first = await build(below("redis", RedisConfig(url=server.url)), Registry())
        assert all(put(first, CHUNKS[:5], NBYTES))
        await first.flush()
        await first.aclose()
        name = "lmcache:" + CHUNKS[3].text
        assert server.command("STRLEN", name) == b":%d\r\n" % frame_nbytes(NBYTES)
        if (content := spoiled()) is None:
            server.command("DEL", name)
            server.command("LPUSH", name, "x")
        else:
            server.command("SET", name, content)
        second = await build(below("redis", RedisConfig(url=server.url)), Registry())
        assert (await served(second, CHUNKS[:5]))[0] == 3

        async def removed():
            return not second.tiers[0].bad

        await eventually(removed)
        assert server.command("EXISTS", name) == b":0\r\n"
        assert all(put(second, CHUNKS[3:4], NBYTES))
        await second.flush()
        third = await build(below("redis", RedisConfig(url=server.url)), Registry())
        assert await served(third, CHUNKS[:5]) == (5, Reason.COMPLETE)
        await closed(second, third)

    drive(main())


@pytest.mark.slow
def test_hanging_server_costs_no_more_than_the_deadline(serve, drive, eventually):
    """Seen in LMCache#1964."""
    server = serve()

    async def main():
        manager = await build(below("redis", RedisConfig(url=server.url), deadline=0.2), Registry())
        assert all(put(manager, CHUNKS, NBYTES))
        await manager.flush()
        other = await build(below("redis", RedisConfig(url=server.url), deadline=0.2), Registry())
        server.suspend()
        loop = asyncio.get_running_loop()
        for _ in range(8):
            began = loop.time()
            assert (await other.lookup(CHUNKS)).leading == 0
            assert loop.time() - began < 0.5
        server.resume()

        async def back():
            return (await other.lookup(CHUNKS)).leading == len(CHUNKS)

        await eventually(back)
        await closed(manager, other)

    drive(main())


@pytest.mark.slow
def test_two_daemons_on_one_server_share_hits(serve, tmp_path):
    """Seen in LMCache#3387."""
    server = serve()
    written = tmp_path / "kv.yaml"
    tiers = [{"cpu": {"size": "64MiB"}}, {"redis": {"url": server.url, "deadline": "5s"}}]
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
