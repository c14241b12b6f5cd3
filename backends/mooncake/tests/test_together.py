"""One store below several caches: hits are shared, and what is damaged there is a miss that heals."""

import asyncio

import pytest
from lmcache_backend_mooncake.native import address, connect

from lmcache_core.registry import Registry
from lmcache_core.storage import Reason
from lmcache_core.storage.build import build
from lmcache_core.testing.worlds import (
    below,
    closed,
    key_of,
    plain_frame,
    put,
    served,
)

NBYTES = 50_001
CHUNKS = [key_of(number) for number in range(12)]


@pytest.mark.slow
def test_hits_are_shared_and_damage_is_a_miss_that_heals(serve, drive, eventually):
    server = serve()
    spoiled = {
        1: plain_frame(CHUNKS[9], NBYTES),  # another key's value
        2: b"garbage" * 5000,
        3: plain_frame(CHUNKS[3], NBYTES)[:-9] + b"flipped!?",
    }

    async def main():
        store, how = connect(server.config())
        first = await build(below("mooncake", server.config()), Registry())
        assert all(put(first, CHUNKS, NBYTES))
        await first.flush()
        second = await build(below("mooncake", server.config()), Registry())
        assert (await second.lookup(CHUNKS)).leading == len(CHUNKS)
        assert await served(second, CHUNKS) == (len(CHUNKS), Reason.COMPLETE)
        await closed(first, second)
        for number, content in spoiled.items():
            name, view = "lmcache:" + CHUNKS[number].text, memoryview(content)
            assert store.batch_remove([name], True) == [0]
            assert store.batch_put_from([name], [address(view)], [len(content)], how) == [0]
        third = await build(below("mooncake", server.config()), Registry())
        for number in spoiled:
            assert (await served(third, CHUNKS[number : number + 1]))[0] == 0

        async def removed():
            return not third.tiers[0].bad

        await eventually(removed)
        assert all(put(third, CHUNKS[1:4], NBYTES))
        await third.flush()
        await closed(third)
        fourth = await build(below("mooncake", server.config()), Registry())
        assert await served(fourth, CHUNKS) == (len(CHUNKS), Reason.COMPLETE)
        await closed(fourth)
        store.close()

    drive(main())


@pytest.mark.slow
def test_hanging_segment_costs_no_more_than_the_deadline_and_its_memory_comes_back(
    serve, drive, eventually
):
    server = serve("--client_ttl=30")  # what the master gives up is gone

    async def main():
        first = await build(below("mooncake", server.config(), deadline=0.3), Registry())
        assert all(put(first, CHUNKS, NBYTES))
        await first.flush()
        second = await build(below("mooncake", server.config(), deadline=0.3), Registry())
        server.provider.suspend()
        loop = asyncio.get_running_loop()
        for _ in range(2):
            began = loop.time()
            assert (await served(second, CHUNKS))[0] == 0
            assert loop.time() - began < 1.0

        async def returned():
            return second.tiers[0].quarantine.nbytes == 0

        await eventually(returned)  # while it still hangs
        server.provider.resume()

        async def back():
            return (await served(second, CHUNKS))[0] == len(CHUNKS)

        await eventually(back)
        await closed(first, second)

    drive(main())
