"""The line that tells what the cache holds."""

import re

from lmcache_engine_vllm.capacity import capacity

from lmcache_core.wire.client import DaemonClient
from tests.wire.daemons import Daemon, describe


def test_capacity_is_told_in_tokens_from_the_tensors_that_were_registered(tmp_path):
    """Seen in noonghunna/club-3090#422: the page said seven times what there was room for."""
    disk = ("--l2-disk-path", str(tmp_path / "kv"), "--l2-disk-size-gb", "0.25")
    with Daemon(tmp_path, "--arena-mode", "shared-rw", *disk) as daemon:
        client = daemon.client(timeout=5)
        room = describe(client)["memory"]["capacity"]
        line = capacity(client, 16 * 1000, 16)
        assert line.startswith("a token takes 1000 bytes of the cache; full: ")
        held = dict(re.findall(r"(\w+) (\d+) tokens", line))
        assert held == {"cpu": str(room // 16000 * 16), "disk": str((1 << 28) // 16000 * 16)}
        client.close()


def test_without_a_daemon_the_bytes_are_told(tmp_path):
    client = DaemonClient(f"unix://{tmp_path}/none", timeout=0.2)
    assert capacity(client, 512, 16) == "a token takes 32 bytes of the cache; full: unknown"
    client.close()
