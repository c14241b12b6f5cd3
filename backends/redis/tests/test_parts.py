"""Values longer than a string may be: whole or absent, whoever writes, dies, evicts or damages in between."""

import asyncio
import contextlib

import pytest
from lmcache_backend_redis.heads import HEAD_NBYTES, MOST_PARTS, Head
from lmcache_backend_redis.resp import Link

from lmcache_core.spi import (
    BufferTooSmall,
    ByteSize,
    Corrupt,
    Load,
    LoadStatus,
    Secret,
    Store,
    StoreStatus,
    Unavailable,
)

MIB = 1 << 20
PART = ByteSize(MIB)
LONG = 3 * MIB + 5
"""A value of four parts."""


class Died(Exception):
    """The writer did: nothing of it runs any more."""


@pytest.fixture(params=["redis", "valkey"])
def server(request, serve):
    return serve(name=request.param)


@pytest.fixture
def split(tier):
    return lambda server, **options: tier(server.url, **({"part_size": PART} | options))


def place(rig, number):
    return f"lmcache:{rig.key(number).text}"


def string(server, name):
    """A short string as the server has it."""
    return server.command("GET", name).partition(b"\r\n")[2][:-2]


def parts_of(server, rig, number):
    name = place(rig, number)
    return Head.read(string(server, name)).names(name.encode())


def numbers_in(reply):
    return int(reply.strip(b":\r\n"))


def count(server):
    return numbers_in(server.command("DBSIZE"))


async def miss(rig, number, nbytes=LONG):
    """Whether a load finds nothing, and leaves the buffer alone."""
    buffer = bytearray(b"?") * nbytes
    (loaded,) = await rig.backend.load([Load(rig.key(number), (memoryview(buffer),))])
    return loaded.status is LoadStatus.MISSED and buffer == b"?" * nbytes


def test_long_values_among_short_ones_are_found_loaded_listed_and_deleted(server, split, drive):
    lengths = [LONG, 17, MIB, MIB + 1, 2 * MIB, HEAD_NBYTES]

    async def main():
        async with split(server) as rig:
            values = [rig.value(number, nbytes) for number, nbytes in enumerate(lengths)]
            stores = [
                Store(rig.key(n), (memoryview(v)[:9], memoryview(v)[9:]))
                for n, v in enumerate(values)
            ]
            for status in (StoreStatus.STORED, StoreStatus.PRESENT):
                assert [one.status for one in await rig.backend.store(stores)] == [status] * 6
            assert [found.nbytes for found in await rig.lookup(*range(6))] == lengths
            buffers = [bytearray(nbytes) for nbytes in lengths]
            loads = [
                Load(rig.key(n), (memoryview(b)[:5], memoryview(b)[5:]))
                for n, b in enumerate(buffers)
            ]
            loaded = await rig.backend.load(loads)
            assert [one.nbytes for one in loaded] == lengths
            assert [bytes(buffer) for buffer in buffers] == values
            keys, foreign = await rig.listing(limit=3)
            assert (sorted(keys), foreign) == (sorted(rig.key(n) for n in range(6)), [])
            assert await rig.backend.delete([rig.key(n) for n in range(7)]) == 6
            assert count(server) == 0

    drive(main())


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 7), (MIB - 1, 2), (5, None), (MIB, MIB), (MIB - 1, MIB + 2), (LONG - 1, 1), (LONG, 0)],
)
def test_ranges_of_a_long_value_cross_its_parts(serve, split, drive, offset, length):
    server = serve()

    async def main():
        async with split(server) as rig:
            await rig.keep(1, nbytes=LONG)
            value = rig.value(1, LONG)[offset:][:length]
            buffer = bytearray(len(value) + 1)
            load = Load(rig.key(1), (memoryview(buffer),), offset, length)
            (loaded,) = await rig.backend.load([load])
            assert loaded.nbytes == len(value)
            assert buffer == value + bytes(1)

    drive(main())


def test_range_past_the_end_and_short_buffers_are_told(serve, split, drive):
    server = serve()

    async def main():
        async with split(server) as rig:
            await rig.keep(1, nbytes=LONG)
            into = (memoryview(bytearray(LONG - 1)),)
            cases = ((0, None, BufferTooSmall), (LONG - 1, 2, Corrupt), (LONG + 1, None, Corrupt))
            for offset, length, error in cases:
                (loaded,) = await rig.backend.load([Load(rig.key(1), into, offset, length)])
                assert isinstance(loaded.error, error)
            assert not any(into[0])

    drive(main())


def test_time_to_live_is_that_of_head_and_parts(server, split, drive):
    async def main():
        async with split(server) as rig:
            assert (await rig.put(1, LONG, ttl=300.0)).status is StoreStatus.STORED
            await rig.keep(2, nbytes=LONG)
            for number, least, most in ((1, 200_000, 300_000), (2, -1, -1)):
                for name in (place(rig, number), *parts_of(server, rig, number)):
                    assert least <= numbers_in(server.command("PTTL", name)) <= most

    drive(main())


def test_of_two_writers_one_is_kept_whole_and_the_other_leaves_nothing(server, split, drive):
    async def main():
        async with split(server, timeout=5.0) as first, split(server, timeout=5.0) as second:
            values = first.value(1, LONG), first.value(2, LONG)
            server.suspend()  # both ask whether it is there before either has stored
            stores = [
                asyncio.ensure_future(rig.backend.store([Store(rig.key(1), (memoryview(value),))]))
                for rig, value in zip((first, second), values, strict=True)
            ]
            await asyncio.sleep(0.1)
            server.resume()
            said = [(await one)[0].status for one in stores]
            assert sorted(one.value for one in said) == ["present", "stored"]
            _, kept = await first.get(1, LONG)
            assert kept == values[said.index(StoreStatus.STORED)]
            assert count(server) == 1 + 4

    drive(main())


def test_head_of_an_earlier_value_or_of_another_key_reaches_nothing(serve, split, drive):
    server = serve()

    async def main():
        async with split(server) as rig:
            await rig.keep(1, 2, nbytes=LONG)
            old = string(server, place(rig, 1))
            await rig.backend.delete([rig.key(1)])
            await rig.backend.store([Store(rig.key(1), (memoryview(rig.value(9, LONG)),))])
            for head in (old, string(server, place(rig, 2))):
                server.command("SET", place(rig, 1), head)
                assert await miss(rig, 1)
                assert await rig.lookup(1) == [None]
            await rig.keep(1, nbytes=LONG)
            assert await rig.has(1, 2, nbytes=LONG)

    drive(main())


@pytest.mark.parametrize(
    "damage", ["UNLINK {}", "SET {} short", "APPEND {} x", "UNLINK {}|LPUSH {} list"]
)
def test_value_that_lacks_a_part_is_a_miss_and_makes_room_for_another(server, split, drive, damage):
    async def main():
        async with split(server) as rig:
            await rig.keep(1, nbytes=LONG)
            part = parts_of(server, rig, 1)[2].decode()
            for line in damage.format(part, part).split("|"):
                server.command(*line.split())
            assert await miss(rig, 1)
            assert count(server) == 0
            await rig.keep(1, nbytes=LONG)
            assert await rig.has(1, nbytes=LONG)

    drive(main())


def test_parts_that_go_during_the_load_are_no_value(serve, split, drive, monkeypatch):
    server, send = serve(), Link.send

    async def main():
        async with split(server) as rig:
            await rig.keep(1, nbytes=LONG)
            last = parts_of(server, rig, 1)[3]

            def sending(link, *views):
                if b"GET\r\n" in bytes(views[0]) and last in bytes(views[0]):
                    server.command("UNLINK", last)
                send(link, *views)

            with monkeypatch.context() as patch:
                patch.setattr(Link, "send", sending)
                loaded, _ = await rig.get(1, LONG)
            assert isinstance(loaded.error, Unavailable)
            assert await miss(rig, 1)

    drive(main())


@pytest.mark.parametrize("sent", [1, 3, 4])
def test_writer_that_dies_before_the_head_leaves_what_nobody_reaches_and_what_expires(
    server, split, drive, monkeypatch, sent
):
    seen, send = [], Link.send

    def sending(link, *views):
        if b"$3\r\nSET\r\n" in bytes(views[0]):
            if len(seen) == sent:
                raise Died
            seen.append(views[0])
        send(link, *views)

    async def main():
        async with split(server) as rig, split(server) as other:
            with monkeypatch.context() as patch, contextlib.suppress(Died):
                patch.setattr(Link, "send", sending)
                await rig.put(1, LONG)
            assert await other.lookup(1) == [None]
            assert await miss(other, 1)
            _, foreign = await other.listing(limit=100)
            assert len(foreign) == sent
            for name in foreign:
                assert 0 < numbers_in(server.command("TTL", name)) <= 600
            await other.keep(1, nbytes=LONG)
            assert await other.has(1, nbytes=LONG)
            assert sorted((await other.listing(limit=100))[1]) == sorted(foreign)

    drive(main())


def test_writer_that_dies_behind_the_head_leaves_a_value_that_expires_into_a_miss(
    serve, split, drive, monkeypatch
):
    server, send = serve(), Link.send

    def sending(link, *views):
        if b"PERSIST" in bytes(views[0]):
            raise Died
        send(link, *views)

    async def main():
        async with split(server) as rig:
            with monkeypatch.context() as patch, contextlib.suppress(Died):
                patch.setattr(Link, "send", sending)
                await rig.put(1, LONG)
            assert await rig.has(1, nbytes=LONG)
            for name in parts_of(server, rig, 1):
                assert server.command("PEXPIRE", name, "1") == b":1\r\n"
            await asyncio.sleep(0.01)
            assert await miss(rig, 1)
            await rig.keep(1, nbytes=LONG)

    drive(main())


def test_value_that_looks_like_a_head_is_a_value(server, split, drive):
    async def main():
        async with split(server) as rig:
            await rig.keep(1, nbytes=LONG)
            value = string(server, place(rig, 1))
            for _ in range(2):  # also as long as the value that was one the first time
                item = Store(rig.key(2), (memoryview(value)[:7], memoryview(value)[7:]))
                (stored,) = await rig.backend.store([item])
                assert stored.status is StoreStatus.STORED
                assert (await rig.lookup(2))[0].nbytes == HEAD_NBYTES
                buffer = bytearray(HEAD_NBYTES)
                await rig.backend.load([Load(rig.key(2), (memoryview(buffer),))])
                assert buffer == value
                value = string(server, place(rig, 2))
                await rig.backend.delete([rig.key(2)])
            assert count(server) == 1 + 4

    drive(main())


def test_full_server_refuses_a_long_value_and_keeps_none_of_it(serve, split, drive):
    server = serve("--maxmemory", "4mb")

    async def main():
        async with split(server) as rig:
            stored = await rig.put(1, 6 * MIB)
            assert stored.status is StoreStatus.REFUSED
            assert stored.reason.startswith("full: OOM")
            assert count(server) == 0
            await rig.keep(1)

    drive(main())


def test_server_that_evicts_parts_while_others_come_has_stored_nothing(serve, split, drive):
    server = serve("--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru")

    async def main():
        async with split(server) as rig:
            stored = await rig.put(1, 8 * MIB)
            assert stored.status is StoreStatus.REFUSED
            assert stored.reason.startswith("full: the server evicted a part")
            assert await rig.lookup(1) == [None]
            assert count(server) == 0

    drive(main())


def test_user_who_may_not_let_parts_stay_is_refused_long_values_only(serve, split, drive):
    server = serve()
    server.command("ACL", "SETUSER", "kv", "on", ">secret", "~lmcache:*", "+@all", "-persist")

    async def main():
        async with split(server, username="kv", password=Secret("secret")) as rig:
            stored = await rig.put(1, LONG)
            assert stored.status is StoreStatus.REFUSED
            assert stored.reason.startswith("not allowed: NOPERM")
            assert count(server) == 0
            await rig.keep(1)
            assert await rig.has(1)

    drive(main())


def test_server_that_dies_in_the_middle_of_a_long_value_keeps_none_of_it(
    server, split, drive, monkeypatch
):
    send = Link.send

    def sending(link, *views):
        if b".2\r\n" in bytes(views[0]):  # the third part
            server.kill()
        send(link, *views)

    async def main():
        async with split(server) as rig:
            with monkeypatch.context() as patch:
                patch.setattr(Link, "send", sending)
                stored = await rig.put(1, LONG)
            assert isinstance(stored.error, Unavailable)
            server.start()
            assert await rig.lookup(1) == [None]
            await rig.keep(1, nbytes=LONG)
            with monkeypatch.context() as patch:
                patch.setattr(Link, "send", sending)
                loaded, _ = await rig.get(1, LONG)
            assert isinstance(loaded.error, Unavailable)
            server.start()
            assert await miss(rig, 1)

    drive(main())


def test_server_that_says_less_than_the_option_gets_less(serve, tier, drive):
    server = serve("--proto-max-bulk-len", "1048576")

    async def main():
        async with tier(server.url) as rig:
            await rig.keep(1, nbytes=MIB)
            await rig.keep(2, nbytes=LONG)
            assert await rig.has(1, nbytes=MIB)
            assert await rig.has(2, nbytes=LONG)
            assert len(parts_of(server, rig, 2)) == 4

    drive(main())


def test_value_of_more_parts_than_a_head_names_is_refused(serve, split, drive):
    """One that is stored and never read again would keep its place from all later ones."""
    server = serve()

    async def main():
        async with split(server, part_size=ByteSize(1)) as rig:
            stored = await rig.put(1, MOST_PARTS + 1)
            assert stored.status is StoreStatus.REFUSED
            assert count(server) == 0

    drive(main())
