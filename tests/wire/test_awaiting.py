"""The same client from coroutines: equal answers, calls side by side, and nothing lost with who stops waiting."""

import asyncio
import signal

from lmcache_core.storage.results import Reason
from lmcache_core.wire.awaiting import AsyncDaemonClient
from tests.wire.daemons import (
    ROOM,
    Daemon,
    check_leases,
    describe,
    fill,
    key,
    store,
    wait_for,
)  # fmt: skip


def test_values_are_stored_found_read_and_deleted(shared):
    async def work():
        async with AsyncDaemonClient(shared.client()) as client:
            held = await client.reserve([(key(n), ROOM + 4096) for n in (1, 2)], None)
            identities = [fill(each, n) for n, each in zip((1, 2), held, strict=True)]
            assert await client.commit_batch(held, identities) == [True, True]
            assert (await client.lookup([key(1), key(2), key(3)])).leading == 2
            loaded = await client.load([key(1), key(2), key(3)], None)
            assert loaded.reason is Reason.MISS
            check_leases(loaded.leases, [1, 2])
            client.release(loaded.leases)
            assert await client.delete([key(1)]) == 1
            assert [tier for tier, *_ in await client.usage()] == ["cpu"]
            assert not (await client.flush()).values
            assert await client.invalidate("nothing") == 0

    asyncio.run(work())


def test_many_calls_wait_side_by_side_while_the_loop_runs_on(shared):
    async def work():
        async with AsyncDaemonClient(shared.client(), threads=4) as client:
            await asyncio.to_thread(store, client.client, *range(10, 20))
            found = await asyncio.gather(*(client.lookup([key(10 + n % 10)]) for n in range(100)))
            assert all(each.leading == 1 for each in found)

    asyncio.run(work())


def test_absent_daemon_is_a_miss_here_too(tmp_path):
    from lmcache_core.wire.client import DaemonClient

    async def work():
        async with AsyncDaemonClient(DaemonClient(f"unix://{tmp_path}/nobody.sock")) as client:
            assert (await client.load([key(1)], None)).leases == ()

    asyncio.run(work())


def test_who_stops_waiting_leaves_neither_lease_nor_reservation_behind(tmp_path):
    """Seen in LMCache#5006."""

    async def cancelled(daemon, call):
        daemon.send(signal.SIGSTOP)
        task = asyncio.create_task(call)
        await asyncio.sleep(0.1)
        task.cancel()
        assert (await asyncio.gather(task, return_exceptions=True))[0].__class__ is (
            asyncio.CancelledError
        )
        daemon.send(signal.SIGCONT)

    async def work(daemon):
        async with AsyncDaemonClient(daemon.client(timeout=10)) as client:
            await asyncio.to_thread(store, client.client, 1)
            await cancelled(daemon, client.load([key(1)], None))
            await cancelled(daemon, client.reserve([(key(2), 4096)], None))

    with Daemon(tmp_path, "--arena-mode", "shared-rw") as daemon:
        watcher = daemon.client()
        asyncio.run(work(daemon))
        memory = wait_for(
            lambda: (found := describe(watcher)["memory"])["reserved"] + found["leased"] == 0
        )
        assert memory
        assert len(describe(watcher)["clients"]) == 1
        watcher.close()
