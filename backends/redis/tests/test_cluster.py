"""Three nodes of a cluster: values are spread, moving slots are followed, a dead node costs its own values only."""

import asyncio
import contextlib
import itertools

import pytest
from lmcache_backend_redis.serving import START, RedisServer, find_server
from redis.crc import key_slot

from lmcache_core.spi import ByteSize, Load, LoadStatus, StoreStatus, Unavailable
from lmcache_core.testing.services import free_port, need_service

pytestmark = pytest.mark.slow
THIRDS = ((0, 5460), (5461, 10922), (10923, 16383))
_prefixes = (f"kv{number}:" for number in itertools.count())


class Cluster:
    """Nodes as processes, formed by hand."""

    def __init__(self, nodes):
        self.nodes = nodes
        for node, (first, last) in zip(nodes, THIRDS, strict=True):
            node.command("CLUSTER", "ADDSLOTSRANGE", str(first), str(last))
            node.command("CLUSTER", "MEET", "127.0.0.1", str(nodes[0].port))
        self.ids = [node.command("CLUSTER", "MYID").split(b"\r\n")[1].decode() for node in nodes]

    @property
    def url(self):
        return "redis-cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    @property
    def whole(self):
        return all(
            b"cluster_state:ok" in node.command("CLUSTER", "INFO")
            and b"cluster_known_nodes:3" in node.command("CLUSTER", "INFO")
            for node in self.nodes
        )

    def owner(self, name):
        return next(i for i, (low, high) in enumerate(THIRDS) if low <= key_slot(name) <= high)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    program = find_server("redis-server")
    need_service("redis", None if program else "no redis-server here", start=START)
    flags = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000",
             "--cluster-require-full-coverage", "no")  # fmt: skip
    with contextlib.ExitStack() as stack:
        made = Cluster(
            [
                stack.enter_context(
                    RedisServer(
                        program, tmp_path_factory.mktemp("n"), *flags, port=free_port(55_000)
                    )
                )
                for _ in range(3)
            ]
        )
        end = asyncio.new_event_loop()
        for _ in range(500):
            if made.whole:
                break
            end.run_until_complete(asyncio.sleep(0.02))
        end.close()
        assert made.whole
        yield made


def name(prefix, rig, number):
    return (prefix + rig.key(number).text).encode()


def test_values_are_spread_found_listed_and_deleted(cluster, tier, drive):
    prefix = next(_prefixes)

    async def main():
        async with tier(cluster.url, prefix=prefix, lanes=2) as rig:
            numbers = range(30)
            await rig.keep(*numbers)
            assert None not in await rig.lookup(*numbers)
            assert await rig.lookup(99) == [None]
            buffers = [bytearray(5000) for _ in numbers]
            loads = [
                Load(rig.key(n), (memoryview(b),)) for n, b in zip(numbers, buffers, strict=True)
            ]
            loaded = await rig.backend.load(loads)
            assert {one.status for one in loaded} == {LoadStatus.FILLED}
            assert [bytes(b) for b in buffers] == [rig.value(n) for n in numbers]
            keys, foreign = await rig.listing(limit=7)
            assert (sorted(keys), foreign) == (sorted(map(rig.key, numbers)), [])
            assert {cluster.owner(name(prefix, rig, n)) for n in numbers} == {0, 1, 2}
            assert await rig.backend.delete([rig.key(n) for n in numbers]) == 30

    drive(main())


def test_parts_of_a_long_value_are_spread_and_a_dead_node_costs_all_of_it(
    cluster, tier, drive, eventually
):
    prefix = next(_prefixes)

    async def main():
        async with tier(cluster.url, prefix=prefix, part_size=ByteSize(1000)) as rig:
            await rig.keep(1, 2, nbytes=20_001)
            assert await rig.has(1, 2, nbytes=20_001)
            assert [found.nbytes for found in await rig.lookup(1, 2)] == [20_001] * 2
            keys, foreign = await rig.listing(limit=7)
            assert (sorted(keys), foreign) == (sorted(map(rig.key, (1, 2))), [])
            mine = [node.command("DBSIZE") for node in cluster.nodes]
            assert all(reply != b":0\r\n" for reply in mine)
            cluster.nodes[1].suspend()
            try:
                loaded, _ = await rig.get(1, 20_001)
                assert isinstance(loaded.error, Unavailable)
            finally:
                cluster.nodes[1].resume()
            await eventually(lambda: rig.has(1, 2, nbytes=20_001))
            assert await rig.backend.delete([rig.key(1), rig.key(2)]) == 2
            assert await rig.listing() == ([], [])

    drive(main())


def test_one_server_of_a_cluster_is_known_as_such(cluster, tier, drive):
    async def main():
        async with tier(
            f"redis://127.0.0.1:{cluster.nodes[1].port}", prefix=next(_prefixes)
        ) as rig:
            await rig.keep(*range(10))
            assert await rig.has(*range(10))

    drive(main())


def test_tag_in_the_prefix_keeps_values_together(cluster, tier, drive):
    async def main():
        async with tier(cluster.url, prefix="{one}:") as rig:
            await rig.keep(*range(10))
            owners = {cluster.owner(name("{one}:", rig, n)) for n in range(10)}
            assert len(owners) == 1

    drive(main())


def test_moving_slot_is_followed_while_it_moves_and_afterwards(cluster, tier, drive):
    prefix = next(_prefixes) + "{moving}:"

    async def main():
        async with tier(cluster.url, prefix=prefix) as rig:
            await rig.keep(1, 2)
            slot = str(key_slot(prefix.encode()))
            old = cluster.owner(name(prefix, rig, 1))
            new = (old + 1) % 3
            source, target = cluster.nodes[old], cluster.nodes[new]
            target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.ids[old])
            source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.ids[new])
            moved = name(prefix, rig, 1)
            reply = source.command("MIGRATE", "127.0.0.1", str(target.port), moved, "0", "5000")
            assert reply == b"+OK\r\n"
            assert await rig.has(1, 2)  # one by ASK, one still where it was
            assert [found.nbytes for found in await rig.lookup(1, 2)] == [5000, 5000]
            await rig.keep(3)  # absent at the source: ASK as well
            assert await rig.has(3)
            assert (await rig.put(1)).status is StoreStatus.PRESENT
            reply = source.command(
                "MIGRATE", "127.0.0.1", str(target.port), name(prefix, rig, 2), "0", "5000"
            )
            assert reply == b"+OK\r\n"
            for node in cluster.nodes:
                node.command("CLUSTER", "SETSLOT", slot, "NODE", cluster.ids[new])
            assert await rig.has(1, 2, 3)  # by MOVED, the first of them
            assert rig.backend.client.place(moved) == ("127.0.0.1", target.port)
            await rig.keep(4)
            assert await rig.has(4)
            assert await rig.backend.delete([rig.key(n) for n in (1, 2, 3, 4)]) == 4

    drive(main())


def test_dead_node_costs_its_own_values_only(cluster, tier, drive, eventually):
    prefix = next(_prefixes)

    async def main():
        async with tier(cluster.url, prefix=prefix) as rig:
            await rig.keep(*range(20))
            dead = cluster.nodes[2]
            theirs = [n for n in range(20) if cluster.owner(name(prefix, rig, n)) == 2]
            others = [n for n in range(20) if n not in theirs]
            assert theirs
            dead.kill()
            assert await rig.has(*others)
            found = await rig.lookup(*range(20))
            assert [n for n in range(20) if found[n] is None] == theirs
            loaded, _ = await rig.get(theirs[0])
            assert isinstance(loaded.error, Unavailable)
            stored = await rig.put(1000 + theirs[0])
            assert stored.status in (StoreStatus.STORED, StoreStatus.FAILED)
            dead.start()

            async def back():
                (one,) = await rig.lookup(others[0])
                return one is not None and (await rig.put(theirs[0])).status is StoreStatus.STORED

            await eventually(back)
            assert await rig.has(theirs[0])

    drive(main())
