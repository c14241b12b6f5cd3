"""Addresses, listings, connections that are cut, and memory that is never given back."""

import os
import select
import socket
import sys
import threading

import pytest
from lmcache_backend_mooncake import client, native
from lmcache_backend_mooncake.client import Client, Flight
from lmcache_backend_mooncake.config import MooncakeConfig
from lmcache_backend_mooncake.faking import FakeMooncake, FakeStore

from lmcache_core.config import load
from lmcache_core.spi import Key, Load, LoadStatus, Region, Store, StoreStatus, Unavailable
from lmcache_core.spi.buffers import MemoryKind
from lmcache_core.testing.contexts import test_context as real_context

CONFIG = MooncakeConfig(url="mooncakestore://127.0.0.1:1")


def key(number):
    return Key(bytes(32), number.to_bytes(32, "big"))


@pytest.mark.parametrize(
    ("url", "master"),
    [
        ("mooncakestore://h:9/", "h:9"),
        ("mooncakestore://h", "h:50051"),
        ("etcd://a:1,b:2", "etcd://a:1;b:2"),
    ],
)
def test_url_says_who_the_master_is(url, master):
    assert MooncakeConfig(url=url).master == master


def test_url_of_the_familiar_form_is_this_tier():
    url = "mooncakestore://h:9/?device=mlx5_1&protocol=rdma"
    tier = load(env={}, flags={"remote_url": url}).config.tiers[-1]
    options = tier.options
    assert (tier.plugin, options.master, options.devices, options.over) == (
        "mooncake", "h:9", "mlx5_1", "rdma",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "http://h"}, "write mooncakestore://"),
        ({"url": "redis://h:1"}, "or etcd://"),
        ({"url": "mooncakestore://h", "protocol": "udp"}, "known: tcp, rdma"),
        ({"url": "mooncakestore://h", "timeout": 60.0}, "at most 50 s"),
        ({"url": "mooncakestore://h", "replicas": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        MooncakeConfig(**options)


def test_missing_library_is_named_with_its_remedy(monkeypatch):
    """Seen in aibrix#1228."""
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    assert "pip install lmcache[mooncake]" in native.problem()

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "mooncake.store":
                missing = "libibverbs.so.1: cannot open shared object file"
                raise ImportError(missing)

    monkeypatch.delitem(sys.modules, "mooncake.store")
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    assert native.problem().endswith("; apt-get install libibverbs1")


def test_only_connections_of_the_given_queues_are_cut():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as watched,
        socket.create_connection(server.getsockname()) as other,
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as asking,
        select.epoll() as queue,
    ):
        accepted = listening.accept()[0]
        near, far = os.pipe()
        for one in (watched, listening, accepted, near):
            queue.register(one, select.EPOLLIN)
        before = native.queues()
        assert queue.fileno() in before
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert native.cut([queue.fileno()], {address}) == 0
        assert native.cut([queue.fileno(), 9999], native.numbers("localhost:1")) == 1
        assert watched.recv(1) == b""
        for one in (other, asking):
            one.send(b"x")
        assert accepted.recv(1) == b"x"
        accepted.close()
        os.close(near)
        os.close(far)


def test_connections_to_what_elects_the_master_are_known_too():
    assert native.numbers("etcd://localhost:1;127.0.0.2:3") >= {"127.0.0.1:1", "127.0.0.2:3"}


def test_address_of_a_view_is_where_its_bytes_are():
    for value in (b"read-only", bytearray(b"writable")):
        import ctypes

        view = memoryview(value)[2:]
        assert ctypes.string_at(native.address(view), view.nbytes) == bytes(view)


class Answering(FakeStore):
    """Says what it is told to, after calling ``before``."""

    def __init__(self, codes, before=lambda: None):
        super().__init__({}, CONFIG)
        self.codes, self.before = codes, before

    def batch_get_into(self, keys, places, sizes):
        self.before()
        return self.codes

    def batch_put_from(self, keys, places, sizes, how):
        return self.codes


def client_of(store, warn=lambda _: None, now=lambda: 0.0):
    return Client(CONFIG, lambda _: (store, None), now, warn)


def test_transfer_that_the_library_left_running_never_gives_its_memory_back():
    times, said = iter((0.0, client.LEFT_S)), []
    made = client_of(Answering([native.TRANSFER]), said.append, lambda: next(times))
    told = threading.Event()
    load = Load(key(1), (memoryview(bytearray(9)),))
    thread = threading.Thread(
        target=lambda: made.load([(0, load)], lambda *_: told.set(), Flight()), daemon=True
    )
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert not told.is_set()
    assert said == ["a transfer was left to itself; its memory is never used again"]


@pytest.mark.parametrize(
    ("code", "status"),
    [(-704, LoadStatus.MISSED), (-712, LoadStatus.MISSED), (-800, LoadStatus.FAILED),
     (-707, LoadStatus.FAILED), (-900, LoadStatus.FAILED), (-600, LoadStatus.MISSED), (7, LoadStatus.FILLED)],
)  # fmt: skip
def test_every_number_of_a_load_has_a_meaning(code, status):
    results = []
    load = Load(key(1), (memoryview(bytearray(9)),))
    made = client_of(Answering([code]))
    made.load([(0, load)], lambda _, result: results.append(result), Flight())
    assert [result.status for result in results] == [status]


@pytest.mark.parametrize(
    ("code", "status"),
    [(0, StoreStatus.STORED), (-200, StoreStatus.REFUSED), (-1700, StoreStatus.REFUSED), (-800, StoreStatus.FAILED)],
)  # fmt: skip
def test_every_number_of_a_store_has_a_meaning(code, status):
    results = []
    store = Store(key(1), (memoryview(b"v"),))
    made = client_of(Answering([code]))
    made.store_all([(0, store)], lambda _, result: results.append(result), Flight())
    assert [result.status for result in results] == [status]


def test_part_that_nobody_waits_for_any_more_is_not_begun(monkeypatch):
    monkeypatch.setattr(client, "CALL_NBYTES", 9)
    flight, results = Flight(), []

    def leave():
        flight.abandoned = True

    made = client_of(Answering([-704], leave))
    loads = [(at, Load(key(at), (memoryview(bytearray(9)),))) for at in range(3)]
    with pytest.raises(Unavailable, match="cancelled before it began"):
        made.load(loads, lambda at, _: results.append(at), flight)
    assert results == [0]


def test_key_that_comes_twice_in_a_batch_is_stored_once(drive):
    async def main():
        backend = FakeMooncake(CONFIG, real_context())
        await backend.open()
        stores = [Store(key(5), (memoryview(b"v"),)) for _ in range(2)]
        stored = await backend.store(stores)
        assert [one.status for one in stored] == [StoreStatus.STORED, StoreStatus.PRESENT]
        await backend.delete([key(5)])
        await backend.aclose()

    drive(main())


def test_memory_is_registered_for_rdma_once_or_for_the_call(drive):
    async def main():
        config = MooncakeConfig(url="mooncakestore://127.0.0.1:2", protocol="rdma")
        backend = FakeMooncake(config, real_context())
        await backend.open()
        store, memory = backend.client.store, memoryview(bytearray(1 << 16))
        assert store.registered == {}
        region = Region(MemoryKind.HOST, 0, native.address(memory), memory.nbytes, memory)
        assert await backend.register(region)
        await backend.store([Store(key(1), (memory[100:200],)), Store(key(2), (memoryview(b"o"),))])
        assert list(store.registered) == [region.pointer]
        await backend.unregister(region)
        assert store.registered == {}
        (loaded,) = await backend.load([Load(key(1), (memoryview(bytearray(100)),))])
        assert loaded.status is LoadStatus.FILLED
        await backend.aclose()

    drive(main())


def test_listing_shows_our_names_and_those_that_are_none(serve, tier, drive):
    server = serve()

    async def main():
        async with tier(server.config()) as rig, tier(server.config(prefix="other:")) as other:
            await rig.keep(*range(7))
            await other.keep(1)
            view = memoryview(b"v")
            rig.backend.client.store.batch_put_from(
                ["lmcache:odd"], [native.address(view)], [1], rig.backend.client._how
            )
            keys, foreign, after = [], [], None
            while True:
                page = await rig.backend.scan(after, limit=3)
                assert len(page.values) + len(page.foreign) <= 3
                keys += [one for one, found in page.values if found.nbytes == 5000]
                foreign += page.foreign
                if (after := page.after) is None:
                    break
            assert (len(set(keys)), foreign) == (7, ["lmcache:odd"])
            server.master.kill()
            with pytest.raises(Unavailable, match="does not answer"):
                await rig.backend.usage()

    drive(main())
