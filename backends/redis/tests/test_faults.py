"""A real server that dies, hangs, fills up, refuses, or holds something else: misses and refusals, and it is found again."""

import asyncio
import functools
import shutil
import subprocess

import pytest
from lmcache_backend_redis.config import TlsConfig
from lmcache_backend_redis.resp import Link

from lmcache_core.spi import (
    ConfigError,
    Corrupt,
    Load,
    LoadStatus,
    Secret,
    Store,
    StoreStatus,
    Unavailable,
)

MIB = 1 << 20


@pytest.fixture(params=["redis", "valkey"])
def serve(serve, request):
    """Both servers are held to everything here."""
    return functools.partial(serve, name=request.param)


@pytest.mark.parametrize("verb", ["load", "store"])
def test_server_killed_in_the_middle_of_a_batch_is_found_again(
    serve, tier, drive, monkeypatch, verb
):
    """Seen in LMCache#1938."""
    server = serve()
    word, sent, send = {"load": b"GET", "store": b"SET"}[verb], [], Link.send

    def sending(link, *views):
        sent.extend([1] * (b"\r\n%s\r\n" % word in bytes(views[0])))
        if len(sent) == 6:
            server.kill()
        send(link, *views)

    async def body(rig):
        numbers = range(12)
        if verb == "load":
            await rig.keep(*numbers, nbytes=2 * MIB)
        buffers = [bytearray(rig.value(n, 2 * MIB)) for n in numbers]
        items = [
            Load(rig.key(n), (memoryview(b),)) if verb == "load" else Store(rig.key(n), (memoryview(b),))
            for n, b in zip(numbers, buffers, strict=True)
        ]  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(Link, "send", sending)
            results = await getattr(rig.backend, verb)(items)
        good = [one.status in (LoadStatus.FILLED, StoreStatus.STORED) for one in results]
        assert all(good[:4])
        assert not all(good)
        assert all(
            isinstance(r.error, Unavailable) for r, ok in zip(results, good, strict=True) if not ok
        )
        with pytest.raises(Unavailable):
            await rig.lookup(1)
        server.start()
        assert await rig.lookup(1) == [None]  # in memory only
        await rig.keep(1)
        assert await rig.has(1)

    async def main():
        async with tier(server.url) as rig:
            await body(rig)

    drive(main())


def test_call_on_a_hanging_server_ends_when_its_caller_leaves(serve, tier, drive):
    server = serve()

    async def main():
        async with tier(server.url, timeout=10.0) as rig:
            await rig.keep(1, 2, nbytes=MIB)
            server.suspend()
            loop = asyncio.get_running_loop()
            for call in (rig.get(1, MIB), rig.put(3, 8 * MIB)):
                began = loop.time()
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(call, 0.1)
                assert loop.time() - began < 1.0
            server.resume()
            assert await rig.has(1, 2, nbytes=MIB)

    drive(main())


def test_hanging_server_is_unavailable_after_the_longest_silence(serve, tier, drive):
    server = serve()

    async def main():
        async with tier(server.url, timeout=0.15) as rig:
            await rig.keep(1)
            server.suspend()
            began = asyncio.get_running_loop().time()
            with pytest.raises(Unavailable, match=r"no word from the server for 0\.15 s"):
                await rig.lookup(1)
            loaded, _ = await rig.get(1)
            assert isinstance(loaded.error, Unavailable)
            stored = await rig.put(2)
            assert isinstance(stored.error, Unavailable)
            assert asyncio.get_running_loop().time() - began < 2.0
            server.resume()
            assert await rig.has(1)

    drive(main())


def test_leaving_one_call_disturbs_no_other(serve, tier, drive):
    server = serve()

    async def main():
        async with tier(server.url, timeout=5.0) as rig:
            await rig.keep(1, 2, nbytes=MIB)
            server.suspend()
            stays, leaves = (asyncio.ensure_future(rig.get(n, MIB)) for n in (1, 2))
            await asyncio.sleep(0.05)
            leaves.cancel()
            await asyncio.wait([leaves])
            server.resume()
            loaded, buffer = await stays
            assert loaded.status is LoadStatus.FILLED
            assert buffer == rig.value(1, MIB)

    drive(main())


def test_of_two_that_store_at_once_one_is_told_that_it_is_there(serve, tier, drive):
    """Seen in Mooncake#180."""
    server = serve()

    async def main():
        async with tier(server.url, timeout=5.0) as first, tier(server.url, timeout=5.0) as second:
            server.suspend()  # both ask whether it is there before either has stored
            values = first.value(1, 5000), first.value(2, 5000)
            stores = [
                asyncio.ensure_future(rig.backend.store([Store(rig.key(1), (memoryview(value),))]))
                for rig, value in zip((first, second), values, strict=True)
            ]
            await asyncio.sleep(0.1)
            server.resume()
            said = [(await one)[0].status for one in stores]
            assert sorted(one.value for one in said) == ["present", "stored"]
            _, kept = await first.get(1)
            assert kept == values[said.index(StoreStatus.STORED)]

    drive(main())


def test_connections_that_the_server_closed_meanwhile_are_made_anew(serve, tier, drive):
    server = serve()

    async def main():
        async with tier(server.url) as rig:
            await rig.keep(1)
            server.command("CLIENT", "KILL", "TYPE", "normal")
            assert await rig.has(1)

    drive(main())


def test_full_server_refuses_stores_and_serves_loads(serve, tier, drive):
    """Seen in Mooncake#197."""
    server = serve("--maxmemory", "8mb")

    async def main():
        async with tier(server.url) as rig:
            kept = []
            for number in range(20):
                stored = await rig.put(number, MIB)
                if stored.status is not StoreStatus.STORED:
                    break
                kept.append(number)
            assert stored.status is StoreStatus.REFUSED
            assert stored.reason.startswith("full: OOM")
            assert await rig.has(*kept, nbytes=MIB)
            assert await rig.backend.delete([rig.key(kept[0])]) == 1

    drive(main())


def test_server_that_evicts_takes_everything_and_misses(serve, tier, drive):
    """Seen in LMCache#3836."""
    server = serve("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru")

    async def main():
        async with tier(server.url) as rig:
            await rig.keep(*range(20), nbytes=MIB)
            found = await rig.lookup(*range(20))
            assert found[-1].nbytes == MIB
            assert None in found
            loaded, _ = await rig.get(found.index(None), MIB)
            assert loaded.status is LoadStatus.MISSED

    drive(main())


def test_wrong_password_is_refused_at_the_start_and_a_miss_later(serve, tier, drive, eventually):
    server = serve("--requirepass", "right-one")

    async def main():
        for options in ({}, {"password": Secret("wrong-one")}):
            with pytest.raises(ConfigError) as error:
                async with tier(server.url, **options):
                    pass
            assert "\n" not in str(error.value)
            assert "wrong-one" not in str(error.value)
        async with tier(server.url, password=Secret("right-one")) as rig:
            await rig.keep(1)
            server.speak(("AUTH", "right-one"), ("CONFIG", "SET", "requirepass", "other"),
                         ("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"))  # fmt: skip
            loaded, _ = await rig.get(1)
            assert isinstance(loaded.error, Unavailable)
            assert not loaded.error.retryable
            server.speak(("AUTH", "other"), ("CONFIG", "SET", "requirepass", "right-one"))
            assert await rig.has(1)

    drive(main())


RIGHTS = (
    "+strlen", "+get", "+getrange", "+set", "+unlink", "+scan", "+info", "+select", "+cluster|slots",
    "+asking",
)  # fmt: skip


def test_user_with_the_documented_rights_needs_no_more(serve, tier, drive):
    server = serve()
    server.command("ACL", "SETUSER", "kv", "on", ">secret", "~mine:*", *RIGHTS)

    async def main():
        login = {"username": "kv", "password": Secret("secret")}
        async with tier(server.url, prefix="mine:", **login) as rig:
            await rig.keep(1, 2)
            assert await rig.has(1, 2)
            assert len((await rig.listing())[0]) == 2
            assert await rig.backend.delete([rig.key(1)]) == 1
        with pytest.raises(ConfigError, match="NOPERM"):
            async with tier(server.url, prefix="yours:", **login):
                pass
        server.command("ACL", "SETUSER", "kv", "-set")
        async with tier(server.url, prefix="mine:", **login) as rig:
            stored = await rig.put(3)
            assert stored.status is StoreStatus.REFUSED
            assert stored.reason.startswith("not allowed: NOPERM")
            assert await rig.has(2)

    drive(main())


@pytest.mark.slow
def test_replica_serves_loads_and_refuses_stores(serve, tier, drive, eventually):
    master = serve("--repl-diskless-sync-delay", "0", tcp=True)
    replica = serve("--replicaof", "127.0.0.1", str(master.port))

    async def main():
        async with tier(master.url) as first, tier(replica.url) as second:
            await first.keep(1)
            await eventually(lambda: second.has(1))
            stored = await second.put(2)
            assert stored.status is StoreStatus.REFUSED
            assert stored.reason.startswith("read-only: READONLY")
            assert await second.has(1)

    drive(main())


def test_something_else_under_a_key_is_damage_that_a_deletion_repairs(serve, tier, drive):
    server = serve()

    async def main():
        async with tier(server.url) as rig:
            server.command("LPUSH", "lmcache:" + rig.key(1).text, "no value")
            assert (await rig.lookup(1))[0] is not None
            loaded, _ = await rig.get(1)
            assert isinstance(loaded.error, Corrupt)
            (part,) = await rig.backend.load([Load(rig.key(1), (memoryview(bytearray(9)),), 1, 2)])
            assert isinstance(part.error, Corrupt)
            assert (await rig.put(1)).status is StoreStatus.PRESENT
            await rig.backend.delete([rig.key(1)])
            await rig.keep(1)
            assert await rig.has(1)

    drive(main())


def test_listing_names_what_is_foreign_and_stays_within_the_prefix(serve, tier, drive):
    server = serve()

    async def main():
        async with tier(server.url, prefix="a[b]*:") as rig:
            await rig.keep(*range(40))
            server.command("SET", "a[b]*:stray", "x")
            server.command("LPUSH", "a[b]*:" + rig.key(99).text, "x")
            server.command("SET", "ab*:" + rig.key(98).text, "not ours")
            keys, foreign = await rig.listing(limit=7)
            assert sorted(keys) == sorted(map(rig.key, range(40)))
            assert sorted(foreign) == sorted(["a[b]*:stray", "a[b]*:" + rig.key(99).text])

    drive(main())


def test_nobody_there_is_unavailable_and_names_the_place(tmp_path, tier, drive):
    """Seen in LMCache#503."""

    async def main():
        for url in (f"unix://{tmp_path}/none.sock", "redis://user:secret@127.0.0.1:1"):
            with pytest.raises(Unavailable) as error:
                async with tier(url):
                    pass
            assert "secret" not in str(error.value)
            assert url.rpartition("@")[2].removeprefix("unix://") in str(error.value)

    drive(main())


@pytest.fixture
def certificate(tmp_path):
    """(certificate, key) of 127.0.0.1, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing: apt-get install openssl")
    names = tmp_path / "c.pem", tmp_path / "k.pem"
    line = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
            "-days", "2", "-subj", "/CN=here", "-addext", "subjectAltName=IP:127.0.0.1",
            "-out", str(names[0]), "-keyout", str(names[1])]  # fmt: skip
    subprocess.run(line, check=True, capture_output=True)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("serve", ["redis"], indirect=True)  # the Valkey of the tests has no TLS
def test_encrypted_connection_carries_values_and_refuses_a_stranger(
    serve, tier, drive, certificate
):
    crt, key = map(str, certificate)
    plain = serve(tcp=True)  # only to have a free port beside it
    port = str(plain.port + 1)
    serve("--tls-port", port, "--tls-cert-file", crt, "--tls-key-file", key,
          "--tls-ca-cert-file", crt, "--tls-auth-clients", "no")  # fmt: skip

    async def main():
        url = f"rediss://127.0.0.1:{port}"
        async with tier(url, tls=TlsConfig(ca=crt)) as rig:
            await rig.keep(1, 2, nbytes=3 * MIB + 7)
            assert await rig.has(1, 2, nbytes=3 * MIB + 7)
        async with tier(url, tls=TlsConfig(verify=False)) as rig:
            assert await rig.has(1, nbytes=3 * MIB + 7)
        with pytest.raises(Unavailable, match="certificate verify failed"):
            async with tier(url):
                pass

    drive(main())
