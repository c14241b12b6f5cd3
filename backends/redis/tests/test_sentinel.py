"""A master behind sentinels: it dies, a replica takes over, and the tier goes there by itself."""

import pytest

from lmcache_core.spi import StoreStatus


@pytest.mark.slow
def test_failover_is_followed(serve, watch, tier, drive, eventually):
    master = serve("--repl-diskless-sync-delay", "0", tcp=True)
    replica = serve("--replicaof", "127.0.0.1", str(master.port), tcp=True)
    sentinel = watch(master)

    async def knows_the_replica():
        return b"num-slaves\r\n$1\r\n1" in sentinel.ask("SENTINEL", "MASTER", "kv")

    async def main():
        async with (
            tier(f"redis-sentinel://127.0.0.1:{sentinel.port}/kv") as rig,
            tier(replica.tcp) as other,
        ):
            await rig.keep(1)
            await eventually(lambda: other.has(1))
            await eventually(knows_the_replica)
            master.kill()
            assert (await rig.get(1))[0].error is not None

            async def taken_over():
                return (await rig.put(2)).status is StoreStatus.STORED

            await eventually(taken_over)
            assert await rig.has(1, 2)
            assert await other.has(2)

    drive(main())
