"""``lmcache check`` of a bucket: every value is looked at; only damage is deleted, and only when asked."""

import asyncio
import json

from lmcache_backend_s3 import S3Backend
from lmcache_backend_s3.transport import Call

from lmcache_core.cli import main
from lmcache_core.spi import Store
from lmcache_core.testing.contexts import test_context as make_context
from lmcache_core.testing.worlds import key_of, plain_frame

KEYS = [key_of(number) for number in range(5)]


def test_damage_is_named_and_only_repair_deletes(seaweed, config, tmp_path, capsys):
    bucket = seaweed.bucket()

    def name(key):
        return f"{config.prefix}{key.digest.hex()[:3]}/{key.text}"

    async def fill():
        backend = S3Backend(config, make_context())
        await backend.open()
        await backend.store([Store(key, (memoryview(plain_frame(key, 50_001)),)) for key in KEYS])
        await backend.aclose()

    asyncio.run(fill())
    for at, content in ((1, plain_frame(KEYS[2], 50_001)), (3, plain_frame(KEYS[3], 50_001)[:-1])):
        bucket.put(name(KEYS[at]), [memoryview(content)], Call(), only_new=False)
    bucket.put(f"{config.prefix}notes", [memoryview(b"mine")], Call(), only_new=False)
    s3 = {
        "url": config.url,
        "endpoint": config.endpoint,
        "access_key": config.access_key.reveal(),
        "secret_key": config.secret_key.reveal(),
    }
    file = tmp_path / "lmcache.yaml"
    file.write_text(json.dumps({"tiers": [{"cpu": {"size": "16MiB"}}, {"s3": s3}]}))
    check = ["check", "s3", "--config", str(file), "--json"]
    assert main(check) == 1
    report = json.loads(capsys.readouterr().out)["s3"]
    assert (report["good"], report["removed"]) == (3, 0)
    assert set(report["damaged"]) == {KEYS[1].text, KEYS[3].text}
    assert len(report["foreign"]) == 1
    assert main([*check, "--repair"]) == 1
    assert json.loads(capsys.readouterr().out)["s3"]["removed"] == 2
    assert main(check) == 0
    assert bucket.head(name(KEYS[1]), Call()) is None
    assert bucket.head(f"{config.prefix}notes", Call()) is not None
