"""Chains as they are configured, on a real disk tier: what lies there, what comes back, what does not."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import asynccontextmanager

import pytest

from lmcache_core import config, frame
from lmcache_core.registry import Registry
from lmcache_core.spi import Key
from lmcache_core.storage.build import build
from lmcache_core.storage.results import Reason
from lmcache_core.testing.serde import bfloat16_noise, kv_spec

for needed in (
    "lmcache_backend_disk",
    "lmcache_backend_cpu",
    "lmcache_serde_lossless",
    "lmcache_serde_encrypt",
):
    pytest.importorskip(needed)

SPEC = kv_spec(tokens=256, heads=2, head_dim=64)
ROOM = frame.header_nbytes(1)
KEYS = [Key(b"s" * 32, bytes([n]) * 32) for n in range(3)]
PAYLOADS = [bfloat16_noise(SPEC.nbytes, n) for n in range(3)]


def key_file(path, *lines):
    path.touch(0o600)
    path.write_text("\n".join(lines))
    return str(path)


@asynccontextmanager
async def manager(folder, serde):
    disk = {
        "path": str(folder),
        "size": "1GiB",
        "ladder" if isinstance(serde[0], list) else "serde": serde,
        "write": "through",
        "deadline": "30s",
    }
    tiers = [{"cpu": {"size": "64MiB"}}, {"disk": disk}]
    settings = {"tiers": tiers, "manager": {"cost_gate": False}}
    made = await build(config.load(flags=settings, env={}).config, Registry())
    try:
        yield made
    finally:
        await made.aclose()


async def stored(folder, serde):
    """All values on disk; their lengths."""
    async with manager(folder, serde) as it:
        grants = it.reserve([(key, ROOM + SPEC.nbytes) for key in KEYS], "me")
        sealed = []
        for grant, payload in zip(grants, PAYLOADS, strict=True):
            grant.view[ROOM:] = payload
            view, first = grant.view, 256 * KEYS.index(grant.key)
            sealed.append(
                frame.seal_value(view[:ROOM], view[ROOM:], grant.key, spec=SPEC, first=first)
            )
        assert all(it.commit_batch(grants, [each.identity for each in sealed]))
        await it.flush()
        return [place.nbytes for place in (await it.lookup(KEYS)).places]


async def loaded(folder, serde):
    """Payloads of the leading values that come back in a new process, and why no more."""
    async with manager(folder, serde) as it:
        found = await it.load(KEYS, "me")
        payloads = []
        for number, lease in enumerate(found.leases):
            header = frame.open_header(lease.view, lease.key)
            assert (header.chain, header.first) == ((), 256 * number)
            frame.verify(header, lease.view[header.nbytes :])
            payloads.append(bytes(lease.view[header.nbytes :][: SPEC.nbytes]))
        it.release(found.leases)
        return payloads, found.reason


def on_disk(folder):
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_chain_is_smaller_secret_and_comes_back_after_a_restart(tmp_path):
    keys = key_file(tmp_path / "keys", secrets.token_hex(32))
    chain = ["x12", {"encrypt": {"key_file": keys}}]
    asyncio.run(stored(tmp_path / "kv", chain))
    content = on_disk(tmp_path / "kv")
    values = content.count(frame.MAGIC)
    assert values == 3
    assert all(payload[at : at + 24] not in content for payload in PAYLOADS for at in (0, 4000))
    assert len(content) < 3 * (SPEC.nbytes / 1.3 + 2 * 4096) + (1 << 20)
    assert asyncio.run(loaded(tmp_path / "kv", chain)) == (PAYLOADS, Reason.COMPLETE)


def test_with_another_key_everything_is_a_miss(tmp_path):
    old, new = (key_file(tmp_path / name, secrets.token_hex(32)) for name in ("old", "new"))
    asyncio.run(stored(tmp_path / "kv", [{"encrypt": {"key_file": old}}]))
    payloads, reason = asyncio.run(loaded(tmp_path / "kv", [{"encrypt": {"key_file": new}}]))
    assert payloads == []
    assert reason is not Reason.COMPLETE


def test_what_another_chain_wrote_is_still_read(tmp_path):
    asyncio.run(stored(tmp_path / "kv", ["xr", "zstd"]))
    assert asyncio.run(loaded(tmp_path / "kv", ["x12"])) == (PAYLOADS, Reason.COMPLETE)


def test_a_ladder_comes_back_after_a_restart_and_reads_what_a_chain_wrote(tmp_path):
    ladder = [[], ["x12"], ["xr"]]
    asyncio.run(stored(tmp_path / "kv", ladder))
    content = on_disk(tmp_path / "kv")
    assert content.count(frame.MAGIC) == 3 * 4  # a header before each form and before all
    assert asyncio.run(loaded(tmp_path / "kv", ladder)) == (PAYLOADS, Reason.COMPLETE)
    asyncio.run(stored(tmp_path / "other", ["zstd"]))
    assert asyncio.run(loaded(tmp_path / "other", ladder)) == (PAYLOADS, Reason.COMPLETE)


def test_a_flipped_bit_is_a_miss_and_nothing_else(tmp_path):
    asyncio.run(stored(tmp_path / "kv", ["xr"]))
    files = [
        p for p in (tmp_path / "kv").rglob("*") if p.is_file() and KEYS[1].digest in p.read_bytes()
    ]
    content = bytearray(files[0].read_bytes())
    at = content.index(KEYS[1].digest) + 20_000
    content[at] ^= 4
    files[0].write_bytes(content)
    payloads, reason = asyncio.run(loaded(tmp_path / "kv", ["xr"]))
    assert payloads == PAYLOADS[: len(payloads)]
    assert len(payloads) < 3
    assert reason is not Reason.COMPLETE
