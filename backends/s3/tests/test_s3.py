"""URLs, names, values in parts, limits, and servers that are busy, lack something or answer nonsense."""

import asyncio
import dataclasses
import json
import sys
import threading

import pytest
from lmcache_backend_s3.config import Conditional
from lmcache_backend_s3.transport import Call

from lmcache_core.config import load
from lmcache_core.spi import (
    BufferTooSmall,
    ByteSize,
    ConfigError,
    Corrupt,
    Load,
    LoadStatus,
    Secret,
    StoreStatus,
)
from lmcache_core.testing.contexts import test_context as real_context
from lmcache_core.wrappers import Retry, RetryOptions

MIB = 1 << 20
PARTS = {"part_size": ByteSize(5 * MIB), "multipart_above": ByteSize(12 * MIB)}


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("s3://kv-cache", "kv-cache", ""),
        ("s3://kv-1/team/a/", "kv-1", "team/a/"),
        ("s3://kv-2.s3.eu-west-1.amazonaws.com/a", "kv-2", "a/"),
        ("s3://kv--use1-az4--x-s3.s3express-use1-az4.us-east-1.amazonaws.com", "kv--use1-az4--x-s3", ""),
    ],
)  # fmt: skip
def test_url_names_bucket_and_prefix(url, bucket, prefix):
    options = load(env={}, flags={"remote_url": url}).config.tiers[-1].options
    assert (options.bucket, options.prefix) == (bucket, prefix)


def test_urls_of_every_provider_are_this_tier():
    for url, plugin in (("s3://kvb/a", "s3"), ("gs://kvb/a", "gs")):
        config = load(env={}, flags={"remote_url": url}).config
        assert config.tiers[-1].plugin == plugin
        assert config.tiers[-1].options.url == url


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "s3://"}, "url names no bucket"),
        ({"url": "gs://kvb"}, "write s3://BUCKET/PREFIX"),
        ({"url": "s3://kvb/a b"}, "other characters"),
        ({"url": "s3://kvb", "endpoint": "kv.example"}, "write http://HOST:PORT"),
        ({"url": "s3://kvb", "access_key": "a"}, "go together"),
        ({"url": "s3://kvb", "part_size": "1MiB"}, "the least is"),
        ({"url": "s3://kvb", "regoin": "eu"}, "region"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_read(options, words):
    with pytest.raises(ConfigError, match=words):
        load(env={}, flags={"tiers": [{"cpu": {"size": "1GiB"}}, {"s3": options}]})


def test_names_begin_with_digits_of_the_digest_and_others_are_foreign(seaweed, config, tier, drive):
    async def main():
        async with tier(config) as rig:
            await rig.keep(1, 2, 3)
            for name in ("notes.txt", f"abc/{rig.key(1).text}"):
                seaweed.bucket().put(config.prefix + name, [], Call(), only_new=False)
            page = await rig.backend.scan()
            assert {key for key, _ in page.values} == {rig.key(n) for n in (1, 2, 3)}
            assert sorted(page.foreign) == [
                f"{config.prefix}abc/{rig.key(1).text}",
                f"{config.prefix}notes.txt",
            ]
            name = rig.backend.name(rig.key(1))
            assert name == f"{config.prefix}{rig.key(1).digest.hex()[:3]}/{rig.key(1).text}"
            assert (await rig.backend.usage()).values == 3

    drive(main())


@pytest.mark.slow
def test_long_values_go_in_parts_both_ways(config, tier, drive):
    async def main():
        nbytes = 17 * MIB + 1
        async with tier(config, **PARTS, timeout=5.0) as rig:
            await rig.keep(1, nbytes=nbytes)
            assert (await rig.put(1, nbytes)).status is StoreStatus.PRESENT
            assert await rig.has(1, nbytes=nbytes)
            want = rig.value(1, nbytes)
            for room, offset, length in ((nbytes + 7 * MIB, 0, None), (11 * MIB, 3, 11 * MIB)):
                buffer = bytearray(room)
                views = (memoryview(buffer)[:MIB], memoryview(buffer)[MIB:])
                (loaded,) = await rig.backend.load([Load(rig.key(1), views, offset, length)])
                got = nbytes if length is None else length
                assert (loaded.status, loaded.nbytes) == (LoadStatus.FILLED, got)
                assert buffer == want[offset : offset + got] + bytes(room - got)
            for load, error in (
                (Load(rig.key(1), (memoryview(bytearray(nbytes - 1)),)), BufferTooSmall),
                (Load(rig.key(1), (memoryview(bytearray(11 * MIB)),), nbytes - MIB, 10 * MIB + 1), Corrupt),
            ):  # fmt: skip
                (loaded,) = await rig.backend.load([load])
                assert isinstance(loaded.error, error)
                assert not any(load.into[0]), "the buffer was touched"
            loaded, _ = await rig.get(2, nbytes)
            assert loaded.status is LoadStatus.MISSED

    drive(main())


@pytest.mark.slow
def test_left_upload_leaves_no_parts(seaweed, config, tier, drive, between):
    uploads = threading.Semaphore(0)

    def twist(request):
        if "partNumber=3" in request.path:
            uploads.release()
            threading.Event().wait(1.0)

    async def main():
        async with tier(config, endpoint=between(twist), **PARTS, timeout=5.0) as rig:
            task = asyncio.ensure_future(rig.put(1, 17 * MIB))
            await asyncio.get_running_loop().run_in_executor(None, uploads.acquire)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            assert await rig.backend.lookup([rig.key(1)]) == [None]
            tree = seaweed.bucket().document(Call(), {"uploads": "", "prefix": config.prefix})
            assert not tree.findall("{*}Upload")

    drive(main())


def test_server_without_conditional_puts_is_asked_before_every_store(config, tier, drive, between):
    asked = []

    def twist(request):
        asked.append(request.command)
        del request.headers["if-none-match"]

    endpoint = between(twist)

    async def main():
        async with tier(config, endpoint=endpoint) as rig:
            del asked[:]
            await rig.keep(1)
            assert asked == ["HEAD", "PUT"]
            assert (await rig.put(1)).status is StoreStatus.PRESENT
            assert asked == ["HEAD", "PUT", "HEAD"]
        with pytest.raises(ConfigError, match="ignores If-None-Match"):
            async with tier(config, endpoint=endpoint, conditional=Conditional.REQUIRED):
                pass

    drive(main())


def test_busy_server_is_asked_again_within_the_budget(config, tier, drive, between):
    busy = []

    def twist(request):
        if busy and request.command == "GET":
            busy.pop()
            return (
                503,
                {},
                b"<Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>",
            )
        return None

    async def main():
        async with tier(config, endpoint=between(twist)) as rig:
            await rig.keep(1)
            busy[:] = [1]
            loaded, _ = await rig.get(1)
            assert loaded.error.retryable
            assert "503 SlowDown: reduce your rate." in str(loaded.error)
            rig.backend = Retry(RetryOptions(attempts=3), real_context(), rig.backend)
            busy[:] = [1, 1]
            assert await rig.has(1)
            assert not busy

    drive(main())


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param((200, {"content-length": "9000"}, b"x" * 5000), id="ends early"),
        pytest.param((200, {"content-length": "many"}, b""), id="a word for a length"),
        pytest.param((200, {"content-length": None}, b"x" * 5000), id="no length"),
        pytest.param((200, {"content-length": "-1"}, b""), id="a negative length"),
        pytest.param((206, {"content-range": "bytes 0-3/4"}, b"1234"), id="a part unasked"),
        pytest.param((302, {"location": "http://127.0.0.1:9/"}, b""), id="elsewhere"),
        pytest.param((999, {}, b"<Error><Code>" + b"A" * 100), id="no status"),
    ],
)
def test_nonsense_is_a_failed_load_and_its_connection_is_not_used_again(
    config, tier, drive, between, answer
):
    lying = []

    def twist(request):
        if lying and request.command == "GET":
            request.close_connection = True
            return lying.pop()
        return None

    async def main():
        async with tier(config, endpoint=between(twist)) as rig:
            await rig.keep(1)
            lying.append(answer)
            loaded, _ = await rig.get(1, 9000)
            assert loaded.status is LoadStatus.FAILED
            assert "\n" not in str(loaded.error)
            assert await rig.has(1)

    drive(main())


def test_wrong_region_is_named_at_the_start(config, tier, drive, between):
    def twist(request):
        body = b"<Error><Code>PermanentRedirect</Code><Message>Use the other.</Message></Error>"
        return 301, {"x-amz-bucket-region": "eu-west-1"}, body

    async def main():
        with pytest.raises(
            ConfigError, match="region or endpoint is wrong; the bucket is in eu-west-1"
        ):
            async with tier(config, endpoint=between(twist)):
                pass

    drive(main())


def test_capacity_is_counted_and_refuses(config, tier, drive, eventually):
    async def main():
        async with tier(config) as rig:
            await rig.keep(1, 2)
        async with tier(config, max_capacity=ByteSize(16_000)) as rig:

            async def counted():
                return (await rig.put(1)).status is StoreStatus.PRESENT

            await eventually(counted)
            await rig.keep(3)
            stored = await rig.put(4)
            assert stored.status is StoreStatus.REFUSED
            assert stored.reason == "full: 15000 of 16000 bytes (max_capacity)"
            assert await rig.has(1, 2, 3)

    drive(main())


def test_credentials_that_expire_are_renewed_in_the_background(
    seaweed, tier, drive, eventually, tmp_path, monkeypatch
):
    access, secret = (
        each.reveal() for each in (seaweed.config().access_key, seaweed.config().secret_key)
    )
    calls, told = tmp_path / "calls", tmp_path / "told.py"
    answer = {"Version": 1, "AccessKeyId": access, "SecretAccessKey": secret, "SessionToken": ""}
    told.write_text(
        f"import datetime, json\nopen({str(calls)!r}, 'a').write('.')\n"
        "soon = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(minutes=5)\n"
        f"print(json.dumps({answer!r} | {{'Expiration': soon.isoformat()}}))\n"
    )
    settings = tmp_path / "aws"
    settings.write_text(
        f"[profile kv]\ncredential_process = {sys.executable} {told}\nregion = eu-north-1\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(settings))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setattr("lmcache_backend_s3.credentials.CHAIN_S", 0.0)

    async def main():
        config = dataclasses.replace(
            seaweed.config("renewed"),
            access_key=Secret(""),
            secret_key=Secret(""),
            profile="kv",
            region="",
        )
        async with tier(config) as rig:
            await rig.keep(1)
            asked = len(calls.read_text())

            async def again():
                assert await rig.has(1)
                return len(calls.read_text()) > asked

            await eventually(again)
        with pytest.raises(ConfigError, match="profile"):
            async with tier(dataclasses.replace(config, profile="nobody")):
                pass

    drive(main())


def test_configuration_shows_no_secret(config):
    text = json.dumps(str(config))
    assert config.secret_key.reveal() not in text
