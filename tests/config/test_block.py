"""The ``lmcache:`` block in a file that belongs to an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_core.spi import ConfigError
from tests.config import plugins
from tests.config.plugins import read

BLOCK = """
model: some/model
tensor_parallel_size: 4
lmcache:
  enable: true
  backend: {type: redis, size: 20GiB, url: "redis://cache"}
  policy: s3fifo
  key_manager: {type: region, region: us}
  peer_to_peer: {enable: true, channel: nixl}
  chunk_size: 64
"""


def test_the_block_is_read_and_the_rest_left_to_the_engine(tmp_path: Path) -> None:
    config = read(tmp_path, BLOCK).config
    backend, peers = config.tiers
    assert backend.options == plugins.RedisOptions(url="redis://cache")
    assert (backend.size, backend.policy) == (20 * 2**30, "s3fifo")
    assert peers.options == plugins.PeerOptions(channel="nixl")
    assert config.engine.chunk_size == 64
    assert config.engine.key_managers[0].options == plugins.RegionOptions(region="us")


def test_sources_name_the_lines_in_the_engines_file(tmp_path: Path) -> None:
    settings = {s.path: s.source for s in read(tmp_path, BLOCK).settings}
    assert settings["tiers.redis.size"] == f"{tmp_path}/kv.yaml:6"
    assert settings["tiers.redis.policy"] == f"{tmp_path}/kv.yaml:7"


def test_the_cache_can_be_switched_off(tmp_path: Path) -> None:
    assert read(tmp_path, "lmcache: {enable: false, backend: {type: cpu}}").config.tiers == ()


def test_peers_can_be_switched_off(tmp_path: Path) -> None:
    text = "lmcache: {backend: {type: cpu}, peer_to_peer: {enable: false}}"
    assert [tier.name for tier in read(tmp_path, text).config.tiers] == ["cpu"]


def test_a_policy_without_a_backend_is_for_the_default_tier(tmp_path: Path) -> None:
    (tier,) = read(tmp_path, "lmcache: {policy: s3fifo, key_manager: {type: default}}").config.tiers
    assert (tier.plugin, tier.policy) == ("cpu", "s3fifo")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lmcache: 3", "kv.yaml:1: lmcache: expected a mapping of keys, got a whole number"),
        ("lmcache: {enabled: true}", "kv.yaml:1: enabled: unknown key; did you mean 'enable'?"),
        ("lmcache: {enable: perhaps}", "kv.yaml:1: lmcache.enable: expected true or false, got text"),
        ("lmcache: {backend: {size: 3}}", "kv.yaml:1: lmcache.backend.type: is required: the name of a plugin"),
        ("lmcache: {key_manager: {type: 3}}", "kv.yaml:1: lmcache.key_manager.type: is required: the name of a plugin"),
        ("lmcache: {enable: true}\ntiers: [cpu]", "kv.yaml:2: tiers: would be ignored beside the lmcache: block; move it inside (@/kv.yaml:1)"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_block_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert str(caught.value) == f"{tmp_path}/{message.replace('@', str(tmp_path))}"
