"""Targets found by name in a real etcd, which comes late, hangs, dies, or holds something old or strange."""

import asyncio
import base64
import json
import urllib.request

import pytest
from lmcache_backend_nixl import directory
from lmcache_backend_nixl.config import NixlConfig
from lmcache_backend_nixl.directory import PREFIX, Directory, Record

from lmcache_core.registry import Registry
from lmcache_core.spi import LoadStatus, Unavailable
from lmcache_core.storage.build import build
from lmcache_core.testing.worlds import below, closed, key_of, served

MIB = 1 << 20
RECORD = Record("127.0.0.1:5560", "an agent", b"its memory")


@pytest.fixture
def name(etcd):
    return f"etcd://{etcd.member}/kv-1"


async def opens(tier, **options):
    """Why it does not, or nothing."""
    try:
        async with tier(backend="UCX", timeout=0.5, **options):
            return ""
    except Unavailable as error:
        return str(error)


@pytest.mark.slow
def test_etcd_that_comes_late_hangs_or_dies_costs_time_and_no_more(
    etcd, name, lend, tier, drive, eventually
):
    target = lend(16 * MIB, "--announce", name)

    async def main():
        loop = asyncio.get_running_loop()
        assert etcd.member in await opens(tier, address=name)
        etcd.start()

        async def found():
            return not await opens(tier, address=name)

        await eventually(found)
        async with tier(backend="UCX", timeout=0.5, address=name) as rig:
            await rig.keep(1)
            etcd.suspend()
            began = loop.time()
            assert "timed out" in await opens(tier, address=name)
            assert loop.time() - began < 4.0
            await rig.keep(2)
            assert await rig.has(1, 2), "who has found it does not need etcd"
            target.kill()
            target.start()  # the agent that etcd has a record of is gone
            began = loop.time()
            loaded, _ = await rig.get(1)
            assert isinstance(loaded.error, Unavailable)
            with pytest.raises(Unavailable):
                await rig.lookup(1)
            assert loop.time() - began < 8.0
            etcd.resume()

            async def back():
                return (await rig.get(1))[0].status is LoadStatus.MISSED

            await eventually(back)
            await rig.keep(3)
            etcd.kill()
            assert etcd.member in await opens(tier, address=name)
            target.suspend()
            assert isinstance((await rig.get(3))[0].error, Unavailable)
            target.resume()
            await eventually(lambda: rig.has(3))  # where etcd said last
            etcd.start()
            await eventually(found)
        told = target.log.read_text()
        assert f"etcd {etcd.member}: " in told
        assert "announced again as kv-1" in told

    drive(main())


@pytest.mark.slow
def test_hanging_etcd_is_misses_within_the_deadline(etcd, name, drive):
    etcd.start().suspend()
    config = below("nixl", NixlConfig(backend="UCX", address=name, timeout=0.5), deadline=0.5)

    async def main():
        manager = await build(config, Registry())
        began = asyncio.get_running_loop().time()
        assert (await served(manager, [key_of(1)]))[0] == 0
        assert asyncio.get_running_loop().time() - began < 4.0
        await closed(manager)

    drive(main())


@pytest.mark.slow
def test_what_is_old_or_no_record_is_told_apart(etcd, name, lend, tier, drive):
    etcd.start()
    target = lend(MIB)
    there = Directory(name, 5.0)

    def garbage(text):
        said = {"key": PREFIX + "kv-1", "value": text}
        said = {word: base64.b64encode(each.encode()).decode() for word, each in said.items()}
        body = json.dumps(said).encode()
        urllib.request.urlopen(f"{etcd.url}/v3/kv/put", body, timeout=5).close()

    async def main():
        assert "knows no target kv-1" in await opens(tier, address=name)
        garbage("nobody wrote this")
        assert "no target's record at kv-1" in await opens(tier, address=name)
        there.announce(Record(target.address, "an agent that died", b"its memory"), "")
        assert "is not the one that etcd has a record of" in await opens(tier, address=name)
        there.announce(Record("127.0.0.1:9", "an agent that died", b"its memory"), "")
        assert "cannot be reached" in await opens(tier, address=name)
        two = name.replace("etcd://", "etcd://127.0.0.1:9,")
        assert Directory(two, 5.0).find().agent == "an agent that died", "the next member is asked"

    drive(main())


@pytest.mark.slow
def test_record_ends_with_its_lease_and_is_written_again(
    etcd, name, drive, eventually, monkeypatch
):
    monkeypatch.setattr(directory, "TTL_S", 1)  # etcd makes it two or so
    etcd.start()
    there = Directory(name, 5.0)

    async def main():
        lease = there.announce(RECORD, "")
        assert there.announce(RECORD, lease) == lease
        assert there.find() == RECORD

        async def ended():
            try:
                there.find()
            except Unavailable:
                return True

        await eventually(ended)
        again = there.announce(RECORD, lease)
        assert again != lease
        assert there.find() == RECORD
        other = Directory(name, 5.0)
        other.announce(Record("127.0.0.1:1", "another", b""), "")
        with pytest.raises(Unavailable, match="another target is called kv-1 now"):
            there.announce(RECORD, again)

    drive(main())


def test_answer_that_is_not_etcds_is_no_answer(weed):
    with pytest.raises(Unavailable) as error:
        Directory(f"etcd://{weed.endpoint.partition('//')[2]}/kv-1", 5.0).find()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("address", ["etcd://a:1", "etcd:///n", "etcd://a/n", "etcd://a:1/n/m"])
def test_name_without_a_member_or_a_member_without_a_name_is_refused(address):
    with pytest.raises(ValueError, match="write HOST:PORT or etcd://HOST:PORT/NAME"):
        NixlConfig(backend="UCX", address=address)
