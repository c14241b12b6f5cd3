"""What the server shows too early or never, and a server that dies, hangs or speaks something else."""

import asyncio
import os
import socket
import threading
from types import SimpleNamespace

import pytest
from lmcache_backend_infinistore import InfiniStoreBackend
from lmcache_backend_infinistore.config import InfiniStoreConfig
from lmcache_backend_infinistore.faking import FakeServer, names_of, request_of
from lmcache_backend_infinistore.link import (
    HEADER,
    MAGIC,
    PAYLOAD,
    PUT,
    Link,
    delete_body,
    payload_body,
)
from lmcache_backend_infinistore.marker import Marker, unpack
from lmcache_backend_infinistore.serving import PROGRAM, START, InfiniServer, find_server

from lmcache_core.config import load
from lmcache_core.spi import Key, Load, LoadStatus, Store, StoreStatus, Unavailable
from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.testing.harness import run_real
from lmcache_core.testing.services import need_service

KEY = Key(bytes(32), bytes(32))
NAME = b"lmcache:" + KEY.text.encode()
BIG = 20 << 20
"""More than a socket holds."""


async def get(backend, nbytes=5000):
    into = memoryview(bytearray(nbytes))
    (loaded,) = await backend.load([Load(KEY, (into,))])
    return loaded, bytes(into)


async def put(backend, value=b"v" * 5000):
    (stored,) = await backend.store([Store(KEY, (memoryview(value),))])
    return stored


def on(server, main, timeout=0.3):
    async def run():
        backend = InfiniStoreBackend(
            InfiniStoreConfig(url=server.url, timeout=timeout), real_context()
        )
        await backend.open()
        await main(backend)
        await backend.aclose()

    run_real(run(), 20.0)


def test_bodies_say_what_they_were_made_of():
    for number in range(9):
        name = b"n" * number
        assert request_of(payload_body(PUT, name, 77)) == (PUT, name, 77)
    names = [os.urandom(n).hex().encode() for n in (1, 2, 3, 70)]
    assert names_of(delete_body(names)) == names


def test_marker_proves_itself():
    marker = Marker(7, bytes(16))
    raw = marker.pack(b"a")
    assert unpack(b"a", raw) == marker
    assert unpack(b"b", raw) is None
    for spoiled in (b"", raw[:-1], raw + b"x", bytes(len(raw)), bytes([raw[0] ^ 1]) + raw[1:]):
        assert unpack(b"a", spoiled) is None


def test_value_that_its_writer_never_finished_is_not_found():
    with FakeServer() as server:

        async def main(backend):
            name = NAME + b".0"
            with socket.create_connection(server.server_address) as sock:
                body = payload_body(PUT, name, 48)
                sock.sendall(HEADER.pack(MAGIC, PAYLOAD, len(body)) + body + b"half")
            while name not in server.values:
                assert await backend.lookup([KEY]) == [None]
            assert await backend.lookup([KEY]) == [None]
            assert (await get(backend))[0].status is LoadStatus.MISSED
            assert (await put(backend)).status is StoreStatus.STORED
            assert (await get(backend))[1] == b"v" * 5000

        on(server, main)


def test_marker_travels_in_one_piece_with_its_request():
    """In two, the server would show it before it is there, and die of whoever asks meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        link, sent = Link(server.getsockname(), 5.0), []
        with link._socket:
            link._socket = SimpleNamespace(
                sendall=sent.append, settimeout=lambda _: None, recv_into=lambda view: len(view)
            )
            link.put(b"k" * 332, [memoryview(Marker(7, bytes(16)).pack(b"k"))])
    assert [len(piece) < 536 for piece in sent] == [True]  # what every way carries whole


def test_marker_whose_value_was_evicted_is_a_miss_and_is_stored_anew():
    with FakeServer() as server:

        async def main(backend):
            assert (await put(backend)).status is StoreStatus.STORED
            for name in [name for name in server.values if name.startswith(NAME + b".")]:
                del server.values[name]
            assert await backend.lookup([KEY]) == [None]
            assert (await get(backend))[0].status is LoadStatus.MISSED
            assert (await put(backend)).status is StoreStatus.STORED
            assert (await get(backend))[1] == b"v" * 5000

        on(server, main)


def test_value_of_another_length_is_a_miss():
    with FakeServer() as server:

        async def main(backend):
            await put(backend)
            (name,) = [name for name in server.values if name.startswith(NAME + b".")]
            server.values[name] = bytearray(4999)
            assert (await get(backend))[0].status is LoadStatus.MISSED
            server.values[NAME] = bytearray(3 << 20)  # no marker
            assert await backend.lookup([KEY]) == [None]
            assert await backend.delete([KEY]) == 1

        on(server, main)


def test_silent_server_costs_the_timeout_and_a_cancelled_call_less():
    with socket.create_server(("127.0.0.1", 0)) as silent, FakeServer() as server:

        async def main(backend):
            assert (await put(backend)).status is StoreStatus.STORED
            while backend._idle_links:
                backend._idle_links.pop().close()
            backend.config = InfiniStoreConfig(
                url=f"infinistore://127.0.0.1:{silent.getsockname()[1]}", timeout=0.3
            )
            loop = asyncio.get_running_loop()
            began = loop.time()
            error = (await get(backend))[0].error
            assert isinstance(error, Unavailable)
            assert str(error).endswith("for 0.3 s")
            assert loop.time() - began < 1.0
            task = asyncio.ensure_future(get(backend))
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.wait([task])
            assert loop.time() - began < 1.5

        on(server, main)


def test_load_that_nobody_waits_for_leaves_its_connection_in_working_order():
    """The server dies of a connection that ends while it sends a value."""
    with FakeServer() as server:

        async def main(backend):
            value = os.urandom(BIG)
            assert (await put(backend, value)).status is StoreStatus.STORED
            server.going.clear()
            into = bytearray(BIG)
            task = asyncio.ensure_future(backend.load([Load(KEY, (memoryview(into),))]))
            while not any(into[:64]):
                await backend.lookup([KEY])
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            before = bytes(into)
            server.going.set()
            assert (await get(backend, BIG))[1] == value
            assert bytes(into) == before

        on(server, main, timeout=5.0)


def test_load_that_was_too_slow_is_taken_to_its_end_by_the_next_one():
    with FakeServer() as server:

        async def main(backend):
            value = os.urandom(BIG)
            assert (await put(backend, value)).status is StoreStatus.STORED
            server.going.clear()
            for _ in range(2):
                assert isinstance((await get(backend, BIG))[0].error, Unavailable)
            server.going.set()
            assert (await get(backend, BIG))[1] == value
            server.going.clear()
            assert isinstance((await get(backend, BIG))[0].error, Unavailable)
            server.going.set()

        on(server, main)  # its end takes the rest, too


def test_store_that_nobody_waits_for_holds_nothing_for_ever():
    with FakeServer() as server:

        async def main(backend):
            server.going.clear()
            assert isinstance((await put(backend, os.urandom(BIG))).error, Unavailable)
            (half,) = server.halves
            server.going.set()
            assert (await put(backend)).status is StoreStatus.STORED
            assert half not in server.values
            assert (await get(backend))[1] == b"v" * 5000

        on(server, main)


def test_full_server_that_ends_the_connection_under_a_long_value_is_a_refusal():
    with FakeServer(limit=2 << 20) as server:

        async def main(backend):
            for _ in range(2):
                stored = await put(backend, bytes(BIG))
                assert stored.status is StoreStatus.REFUSED
                assert stored.reason.startswith("full")
            assert (await put(backend)).status is StoreStatus.STORED

        on(server, main, timeout=5.0)


def test_connection_that_the_server_closed_is_made_again():
    with FakeServer() as server:

        async def main(backend):
            await put(backend)
            for link in backend._idle_links:
                link._socket.shutdown(socket.SHUT_RDWR)  # the server's doing, not ours
            assert (await get(backend))[1] == b"v" * 5000

        on(server, main)


def test_connection_cut_when_its_call_was_done_is_not_used_again():
    with FakeServer() as server:

        async def main(backend):
            await put(backend)
            with backend._link():
                backend.interrupt_blocking()  # of a call that was cancelled beside it
            assert (await get(backend))[1] == b"v" * 5000

        on(server, main)


def test_url_of_the_familiar_form_is_this_tier():
    tier = load(env={}, flags={"remote_url": "infinistore://h:9/?device=mlx5_1"}).config.tiers[-1]
    assert (tier.plugin, tier.options.place, tier.options.rdma) == (
        "infinistore",
        ("h", 9),
        "mlx5_1",
    )
    with pytest.raises(ValueError, match="write infinistore://"):
        InfiniStoreConfig(url="http://h")


def test_missing_library_is_named_where_rdma_is_asked_for(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "infinistore", None)

    async def main():
        config = InfiniStoreConfig(url="infinistore://127.0.0.1:9", device="mlx5_0")
        backend = InfiniStoreBackend(config, real_context())
        with pytest.raises(ValueError, match="pip install infinistore"):
            await backend.open()
        await backend.aclose()

    run_real(main(), 5.0)


def test_real_server_that_hangs_or_dies_is_found_again(tmp_path):
    program = find_server()
    need_service("infinistore", None if program else f"no {PROGRAM} here", start=START)
    with InfiniServer(program, tmp_path) as server:

        async def main(backend):
            for spoil, mend in ((server.suspend, server.resume), (server.kill, server.start)):
                assert (await put(backend)).status is StoreStatus.STORED
                spoil()
                began = asyncio.get_running_loop().time()
                assert isinstance((await get(backend))[0].error, Unavailable)
                assert isinstance((await put(backend)).error, Unavailable)
                assert asyncio.get_running_loop().time() - began < 3.0
                mend()
                await backend.delete([KEY])
                assert (await get(backend))[0].status is LoadStatus.MISSED

        on(server, main)


def test_real_server_outlives_calls_that_nobody_waits_for(tmp_path):
    program = find_server()
    need_service("infinistore", None if program else f"no {PROGRAM} here", start=START)
    with InfiniServer(program, tmp_path) as server:

        async def main(backend):
            value, other = os.urandom(BIG), Key(bytes(31) + b"1", bytes(32))
            assert (await put(backend, value)).status is StoreStatus.STORED
            for number in range(8):
                into = memoryview(bytearray(BIG))
                verbs = backend.load([Load(KEY, (into,))]), backend.store([Store(other, (into,))])
                tasks = [asyncio.ensure_future(verb) for verb in verbs]
                await asyncio.sleep(0.003 * number)
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                await backend.delete([other])
            assert (await get(backend, BIG))[1] == value

        on(server, main, timeout=5.0)


def test_reader_beside_a_slow_writer_sees_nothing_or_all():
    with FakeServer() as server:
        link = Link(server.server_address, 5.0)
        value = os.urandom(1 << 20)

        async def main(backend):
            slow = threading.Thread(
                target=link.put, args=(NAME + b".ff", [memoryview(value)]), daemon=True
            )
            slow.start()
            for _ in range(20):
                assert await backend.lookup([KEY]) == [None]
            slow.join()

        on(server, main)
        link.close()
