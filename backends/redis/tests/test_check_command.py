"""``lmcache check redis://...``: every value is looked at while others use the store; only damage is deleted."""

import asyncio
import json

import pytest
from lmcache_backend_redis import RedisBackend
from lmcache_backend_redis.config import RedisConfig

from lmcache_core.cli import main
from lmcache_core.spi import Store
from lmcache_core.testing.contexts import test_context as make_context
from lmcache_core.testing.worlds import key_of, plain_frame

KEYS = [key_of(number) for number in range(6)]


@pytest.fixture
def filled(serve):
    """A server with four good values, one of another key, one cut off, and a key of somebody else."""
    server = serve()

    async def fill():
        backend = RedisBackend(RedisConfig(url=server.url), make_context())
        await backend.open()
        await backend.store([Store(key, (memoryview(plain_frame(key, 50_001)),)) for key in KEYS])
        await backend.aclose()

    asyncio.run(fill())
    server.command("SET", f"lmcache:{KEYS[1].text}", plain_frame(KEYS[2], 50_001))
    server.command("SET", f"lmcache:{KEYS[4].text}", plain_frame(KEYS[4], 50_001)[:-1])
    server.command("SET", "lmcache:notes", "mine")
    server.command("SET", "other", "not in the prefix")
    return server


def test_damage_is_named_and_only_repair_deletes(filled, capsys):
    assert main(["check", filled.url, "--json"]) == 1
    out = capsys.readouterr().out
    (report,) = json.loads(out).values()
    assert (report["good"], report["removed"], report["gone"]) == (4, 0, 0)
    assert set(report["damaged"]) == {KEYS[1].text, KEYS[4].text}
    assert report["foreign"] == ["lmcache:notes"]
    assert main(["check", filled.url, "--repair"]) == 1
    said = capsys.readouterr()
    assert f"damaged: {KEYS[1].text}" in said.err
    assert said.out.split()[-4:] == ["2", "1", "0", "2"]
    assert main(["check", filled.url]) == 0
    assert filled.command("DBSIZE") == b":6\r\n"


def test_a_tier_of_the_configuration_is_checked_by_its_name(filled, tmp_path, capsys):
    file = tmp_path / "lmcache.yaml"
    file.write_text(f"tiers:\n  - cpu: {{size: 16MiB}}\n  - redis: {{url: '{filled.url}'}}\n")
    assert main(["check", "redis", "--config", str(file), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["redis"]["good"] == 4
    assert main(["check", "reddis", "--config", str(file)]) == 2
    assert "no tier 'reddis'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "status", "said"),
    [
        ("redis://127.0.0.1:1", 3, "unreachable"),
        ("floppy://a", 2, "no plugin for 'floppy'; known: az, "),
    ],
)
def test_what_cannot_be_checked_is_one_line(target, status, said, capsys):
    assert main(["check", target]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
