"""URLs and names of configuration, values whose length the server limits, and what the parser makes of any reply."""

import contextlib
import logging
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmcache_backend_redis import RedisBackend, ValkeyBackend
from lmcache_backend_redis.client import Flight
from lmcache_backend_redis.config import KINDS, RedisConfig, target_of
from lmcache_backend_redis.moving import LOADING, move
from lmcache_backend_redis.resp import Broken, Link, Said

from lmcache_core.config import load
from lmcache_core.config.names import SCHEMES
from lmcache_core.spi import (
    BufferTooSmall,
    ByteSize,
    ConfigError,
    Key,
    Load,
    LoadStatus,
    Secret,
    Store,
    StoreStatus,
    Unavailable,
)


@pytest.mark.parametrize(
    ("url", "kind", "hosts", "database", "encrypted"),
    [
        ("redis://cache", "redis", (("cache", 6379),), 0, False),
        ("redis://cache:7000/3", "redis", (("cache", 7000),), 3, False),
        ("redis://[::1]:7000", "redis", (("::1", 7000),), 0, False),
        ("redis://[::1]", "redis", (("::1", 6379),), 0, False),
        ("rediss://cache?db=2", "redis", (("cache", 6379),), 2, True),
        ("valkeys://cache", "redis", (("cache", 6379),), 0, True),
        ("valkey-cluster://a:1", "redis-cluster", (("a", 1),), 0, False),
        ("rediss-cluster://a:1", "redis-cluster", (("a", 1),), 0, True),
        ("valkeys-sentinel://a/kv", "redis-sentinel", (("a", 26379),), 0, True),
        ("resp://cache:1", "redis", (("cache", 1),), 0, False),
        ("redis-cluster://a:1,b:2", "redis-cluster", (("a", 1), ("b", 2)), 0, False),
        ("redis-sentinel://a,b:2/kv?db=1", "redis-sentinel", (("a", 26379), ("b", 2)), 1, False),
        ("unix:///run/r.sock?db=1", "unix", (), 1, False),
    ],
)
def test_url_says_where(url, kind, hosts, database, encrypted):
    found = target_of(RedisConfig(url=url))
    assert (found.kind, found.hosts, found.database, found.encrypted) == (
        kind, hosts, database, encrypted,
    )  # fmt: skip


def test_login_and_service_come_from_the_url_or_beside_it():
    found = target_of(RedisConfig(url="redis-sentinel://u:p%40ss@a:1/kv"))
    assert (found.username, found.password, found.service) == ("u", "p@ss", "kv")
    assert "p%40ss" not in found.shown
    found = target_of(RedisConfig(url="redis://u:p@a", username="v", password=Secret("q")))
    assert (found.username, found.password, found.service) == ("v", "q", "mymaster")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://cache", "no scheme 'http'; valid: redis, redis-cluster, "),
        ("cache:6379", "no scheme 'cache'; valid: "),
        ("redis-sentinels://cache", "no scheme 'redis-sentinels'; did you mean redis-sentinel://?"),
        ("redis_cluster://cache", "no scheme 'redis_cluster'; did you mean redis-cluster://?"),
        ("redis://", "is no HOST:PORT"),
        ("redis://cache:99999", "is no HOST:PORT"),
        ("redis://u:secret@cache:x", "'cache:x' is no HOST:PORT"),
        ("redis://cache/x", "database 'x' is no number"),
        ("redis-cluster://cache/1", "a cluster has database 0 only"),
        ("unix://", "needs an absolute path"),
        ("redis://[::1", "Invalid IPv6"),
    ],
)
def test_wrong_url_is_refused_in_one_line_without_its_secret(url, message):
    with pytest.raises(ConfigError) as error:
        target_of(RedisConfig(url=url))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


def test_known_names_make_a_tier():
    flags = {"remote_url": "redis://cache:7000", "extra_config": {"redis_prefix": "x:"}}
    tier = load(env={}, flags=flags).config.tiers[-1]
    assert (tier.plugin, tier.options) == (
        "redis",
        RedisConfig(url="redis://cache:7000", prefix="x:"),
    )


@pytest.mark.parametrize("scheme", KINDS)
def test_every_form_that_the_tier_knows_is_a_known_name(scheme):
    url = f"{scheme}:///c" if scheme == "unix" else f"{scheme}://c"
    tier = load(env={}, flags={"remote_url": url}).config.tiers[-1]
    assert tier.plugin == ("valkey" if scheme.startswith("valkey") else "redis")
    assert tier.options.url == url


def test_every_known_name_is_a_form_that_the_tier_knows():
    assert {s for s, (plugin, _) in SCHEMES.items() if plugin in ("redis", "valkey")} == {*KINDS}


def test_nonsense_counts_are_refused():
    with pytest.raises(ValueError, match="lanes must be at least 1"):
        RedisConfig(url="redis://x", lanes=0)
    with pytest.raises(ValueError, match="part_size must be at most 512MiB"):
        RedisConfig(url="redis://x", part_size=ByteSize(1 << 30))


@pytest.mark.parametrize("backend", [RedisBackend, ValkeyBackend])
def test_testing_configuration_is_a_server_of_its_own(backend, serve, tier, drive):
    serve(name="redis" if backend is RedisBackend else "valkey")  # or a skip that says why

    async def main():
        async with tier(backend.testing_config().url) as rig:
            await rig.keep(1)

    drive(main())


@pytest.mark.parametrize("lanes", [1, 3])
def test_batch_of_long_values_comes_back_in_its_places(serve, tier, drive, lanes):
    server, lengths = serve(), [3 << 20, 17, 1 << 20, (2 << 20) + 1, 5 << 20, 70_000]

    async def main():
        async with tier(server.url, lanes=lanes) as rig:
            values = [rig.value(number, nbytes) for number, nbytes in enumerate(lengths)]
            halves = [(memoryview(v)[: len(v) // 2], memoryview(v)[len(v) // 2 :]) for v in values]
            stores = [Store(rig.key(number), parts) for number, parts in enumerate(halves)]
            stored = await rig.backend.store([*stores[:4], stores[0], *stores[4:]])
            said = [one.status for one in stored]
            assert said.count(StoreStatus.PRESENT) == 1
            assert said.count(StoreStatus.STORED) == len(lengths)
            buffers = [bytearray(nbytes) for nbytes in lengths]
            loads = [Load(rig.key(n), (memoryview(b),)) for n, b in enumerate(buffers)]
            absent = Load(rig.key(99), (memoryview(bytearray(9)),))
            short = Load(rig.key(0), (memoryview(bytearray(9)),))
            loaded = await rig.backend.load([*loads[:3], absent, short, *loads[3:]])
            assert loaded[3].status is LoadStatus.MISSED
            assert isinstance(loaded[4].error, BufferTooSmall)
            assert [bytes(b) for b in buffers] == values

    drive(main())


def test_server_that_takes_nothing_is_named_once_and_still_serves(serve, tier, drive, caplog):
    """Seen in sglang#12092."""
    server = serve("--maxmemory", "100kb")

    async def main():
        with caplog.at_level(logging.WARNING):
            async with tier(server.url) as rig:
                assert (await rig.get(1))[0].status is LoadStatus.MISSED

    drive(main())
    assert [record.getMessage() for record in caplog.records] == [
        "test takes no values: full: OOM command not allowed when used memory > 'maxmemory'."
    ]


class Scripted:
    """The client's end of a conversation in which the other side says only this, and leaves."""

    def __init__(self, said):
        self._sock, other = socket.socketpair()
        other.sendall(said)
        other.close()

    def connect(self):
        """It is."""

    def disconnect(self):
        self._sock.close()


def scripted(said):
    return Link(Scripted(said), 1.0)


@given(st.binary(max_size=300) | st.lists(st.sampled_from(
    [b"+OK\r\n", b"-ERR x\r\n", b":12\r\n", b"$3\r\nabc\r\n", b"$-1\r\n", b"*2\r\n", b"*-1\r\n", b"$9999999999\r\n",
     b"*1\r\n", b"$3\r\nab", b"\r\n", b":x\r\n", b"$x\r\n", b"_\r\n", b"$0\r\n\r\n", b":1\n"]), max_size=12).map(b"".join))  # fmt: skip
def test_any_reply_is_read_or_breaks_the_connection(said):
    """Seen in LMCache#651."""
    for read in ("reply", "bulk"):
        link = scripted(said)
        with contextlib.suppress(Broken):
            for _ in range(20):
                found = getattr(link, read)()
                if read == "bulk" and isinstance(found, int):
                    link.discard(found)
        link.close()


def test_nested_replies_end_somewhere():
    link = scripted(b"*1\r\n" * 100)
    with pytest.raises(Broken, match="no reply begins with"):
        link.reply()
    link.close()


def test_values_cross_the_edge_of_the_reading_buffer():
    for nbytes in (0, 1, 16_370, 16_384, 50_000):
        value = bytes(range(256)) * 200
        said = b"".join(b"$%d\r\n%s\r\n" % (nbytes, value[:nbytes]) for _ in range(3))
        link = scripted(said + b"+OK\r\n")
        parts = [memoryview(bytearray(n)) for n in (nbytes // 3, nbytes - nbytes // 3)]
        assert link.bulk() == nbytes
        link.fill(parts)
        assert b"".join(parts) == value[:nbytes]
        assert link.bulk() == nbytes
        link.discard(nbytes)
        assert link.bulk() == nbytes
        link.fill([memoryview(bytearray(nbytes))])
        assert link.reply() == b"OK"
        link.close()


def test_part_that_shrank_between_two_replies_is_a_miss():
    for said, status in (
        (b":10\r\n$3\r\nabc\r\n", LoadStatus.MISSED),
        (b":10\r\n$5\r\nabcde\r\n", LoadStatus.FILLED),
    ):
        link, buffer = scripted(said + b"+OK\r\n"), bytearray(9)
        load = Load(Key(bytes(32), bytes(32)), (memoryview(buffer),), 2, 5)
        assert LOADING.read(link, load).status is status
        assert link.reply() == b"OK"
        link.close()


class Only:
    """A client that has one connection, and nothing else to turn to."""

    def __init__(self, link):
        self.link = lambda address, flight: contextlib.nullcontext(link)


@pytest.mark.parametrize(
    ("unix", "course"),
    [(True, "ask read ask read ask read"), (False, "ask ask read ask read read")],
)
def test_next_value_is_asked_for_ahead_except_over_a_unix_socket(unix, course):
    link, seen = scripted(b"$3\r\nabc\r\n" * 3), []
    assert link.unix
    link.unix, bulk = unix, link.bulk
    link.send = lambda *views: seen.append("ask")
    link.bulk = lambda: seen.append("read") or bulk()
    loads = [Load(Key(bytes(32), bytes([n]) * 32), (memoryview(bytearray(3)),)) for n in range(3)]
    told = {}
    items = [(at, b"name", load) for at, load in enumerate(loads)]
    move(Only(link), LOADING, None, items, told.__setitem__, Flight())
    assert " ".join(seen) == course
    assert [told[n].status for n in range(3)] == [LoadStatus.FILLED] * 3
    assert [bytes(load.into[0]) for load in loads] == [b"abc"] * 3
    link.close()


def test_error_replies_say_whether_trying_again_helps():
    assert Said("LOADING", "LOADING x").unavailable("load").retryable
    assert not Said("NOPERM", "NOPERM x").unavailable("load").retryable
    assert isinstance(Said("ERR", "ERR x").unavailable("load"), Unavailable)
