"""The one grammar for tiers."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_core.config import PluginChoice, Share, WritePolicy
from lmcache_core.config.binding import shown
from lmcache_core.spi import ByteSize, Duration
from tests.config import plugins
from tests.config.plugins import read

EXAMPLE = """
chunk_size: 256
tiers:                       # order = lookup order
  - cpu:   {size: 20GiB, policy: lru}
  - disk:  {path: [/nvme0/kv, /nvme1/kv], size: 1TiB, write: back, serde: [zip], deadline: 50ms}
  - redis: {name: shared, url: "rediss://cache:6379", ttl: 1d, wrappers: {breaker: {open_after: 5}}}
tenants: {default: {quota: 50%}}
plugins: {allow: [cpu, disk, redis]}
"""


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    config = read(tmp_path, EXAMPLE).config
    cpu, disk, shared = config.tiers
    assert [tier.name for tier in config.tiers] == ["cpu", "disk", "shared"]
    assert cpu.size == 20 * 2**30
    assert cpu.policy == "lru"
    assert disk.options == plugins.DiskOptions(path=(Path("/nvme0/kv"), Path("/nvme1/kv")))
    assert disk.write is WritePolicy.BACK
    assert disk.deadline == 0.05
    assert disk.serde == (PluginChoice(name="zip", options=plugins.NoOptions()),)
    assert shared.plugin == "redis"
    assert shared.ttl == Duration(86400)
    assert shared.wrappers == {"breaker": plugins.BreakerOptions(open_after=5)}
    assert config.tenants["default"].quota == 0.5
    assert config.plugins.allow == ("cpu", "disk", "redis")


def test_nothing_configured_is_memory_of_a_modest_size(tmp_path: Path) -> None:
    """Seen in LMCache#283."""
    (tier,) = read(tmp_path, "").config.tiers
    assert (tier.plugin, tier.size) == ("cpu", 5 * 2**30)


def test_no_tiers_can_be_asked_for(tmp_path: Path) -> None:
    assert read(tmp_path, "tiers: []").config.tiers == ()


def test_a_name_alone_is_a_tier_with_defaults(tmp_path: Path) -> None:
    (tier,) = read(tmp_path, "tiers: [cpu]").config.tiers
    assert tier.options == plugins.CpuOptions()
    assert tier.size is None


def test_a_key_that_both_know_goes_to_both(tmp_path: Path) -> None:
    (tier,) = read(tmp_path, "tiers: [{cpu: {size: 2GiB}}]").config.tiers
    assert tier.size == 2 * 2**30
    assert tier.options == plugins.CpuOptions(size=ByteSize(2 * 2**30))


def test_a_ladder_is_a_list_of_chains(tmp_path: Path) -> None:
    (tier,) = read(
        tmp_path,
        "tiers: [{cpu: {ladder: [[], [zip], [quant: {bits: 8}], [{quant: {bits: 4}}, zip]],"
        " ladder_target: 200ms}}]\n",
    ).config.tiers
    assert [[choice.name for choice in chain] for chain in tier.chains] == [
        [], ["zip"], ["quant"], ["quant", "zip"],
    ]  # fmt: skip
    assert tier.ladder[2][0].options == plugins.QuantOptions(bits=8)
    assert (tier.serde, tier.ladder_target) == ((), 0.2)
    assert shown(tier.ladder[1:3]) == [[{"zip": {}}], [{"quant": {"bits": 8}}]]


def test_options_of_policy_serde_key_manager_and_observer_are_bound(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        "tiers: [{cpu: {policy: {s3fifo: {small: 0.2}}, serde: [{quant: {bits: 4}}, zip]}}]\n"
        "key_managers: [{region: {region: us}}]\n"
        "observers: [watch]\n",
    ).config
    (tier,) = config.tiers
    assert (tier.policy, tier.policy_options) == ("s3fifo", plugins.PolicyOptions(small=0.2))
    assert [choice.options for choice in tier.serde] == [
        plugins.QuantOptions(bits=4),
        plugins.NoOptions(),
    ]
    assert config.engine.key_managers[0].options == plugins.RegionOptions(region="us")
    assert config.observers[0].name == "watch"


def test_a_quota_is_a_share_or_a_size(tmp_path: Path) -> None:
    text = "tenants: {a: {quota: 25%}, b: {quota: 0.5}, c: {quota: '0.5'}, d: {quota: 3GiB}, e: {quota: 4096}}"
    quotas = {name: tenant.quota for name, tenant in read(tmp_path, text).config.tenants.items()}
    assert quotas == {"a": 0.25, "b": 0.5, "c": 0.5, "d": 3 * 2**30, "e": 4096}
    assert {name for name, quota in quotas.items() if isinstance(quota, Share)} == {"a", "b", "c"}


def test_a_wrapper_can_be_left_out(tmp_path: Path) -> None:
    (tier,) = read(tmp_path, "tiers: [{cpu: {wrappers: {breaker: false}}}]").config.tiers
    assert tier.wrappers == {"breaker": False}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "tiers:\n- cpu:\n  size: 1GiB\n",
            "kv.yaml:2: tiers[0]: expected one mapping NAME: {options}, got the keys cpu, size"
            " (options are indented further)",
        ),
        (
            "tiers:\n- [cpu]\n",
            "kv.yaml:2: tiers[0]: expected one mapping NAME: {options}, got something else"
            " (options are indented further)",
        ),
        (
            "tiers: {cpu: {size: 1GiB}}",
            "kv.yaml:1: tiers: expected a list, one item `- PLUGIN: {options}` per tier",
        ),
        (
            "tiers: [{cpu: {sice: 1GiB}}]",
            "kv.yaml:1: tiers.cpu.sice: unknown key; did you mean 'size'?",
        ),
        (
            "tiers: [{cpu: {huge_page: true}}]",
            "kv.yaml:1: tiers.cpu.huge_page: unknown key; did you mean 'huge_pages'?",
        ),
        (
            "tiers: [{cpu: {chunk_size: 3}}]",
            "kv.yaml:1: tiers.cpu.chunk_size: unknown key; it belongs at the top level",
        ),
        (
            "tiers: [{cpu: {size: 20GBB}}]",
            "kv.yaml:1: tiers.cpu.size: unknown unit 'GBB' in size '20GBB'; did you mean GB?",
        ),
        (
            "tiers: [{cpu: {ttl: 5 parsecs}}]",
            "kv.yaml:1: tiers.cpu.ttl: unknown unit 'parsecs' in duration '5 parsecs';"
            " did you mean s?",
        ),
        (
            "tiers: [{cpu: {size: {a: secret}}}]",
            "kv.yaml:1: tiers.cpu.size: expected a single value, got a mapping",
        ),
        (
            "tiers: [{cpu: {write: bach}}]",
            "kv.yaml:1: tiers.cpu.write: not one of the choices: 'bach'; did you mean 'back'?",
        ),
        (
            "tiers: [{disk: {path: /x, sync: always}}]",
            "kv.yaml:1: tiers.disk.sync: not one of the choices: 'always'; valid: none, power",
        ),
        (
            "tiers: [{cpu: {after_touches: 3}}]",
            "kv.yaml:1: tiers.cpu: after_touches is 1 or 2, not 3",
        ),
        (
            "tiers: [{cpu: {name: 'a b'}}]",
            "kv.yaml:1: tiers.a b: not a tier name: 'a b' (letters, digits, '_', '-', '.')",
        ),
        (
            "tiers: [{cpu: {name: {a: 1}}}]",
            "kv.yaml:1: cpu.name: expected a single value, got a mapping",
        ),
        (
            "tiers:\n- cpu\n- cpu\n",
            "kv.yaml:3: tiers.cpu: two tiers of one name; give one of them `name: ...`",
        ),
        ("tiers: [{disk: {}}]", "kv.yaml:1: tiers.disk.path: is required"),
        (
            "tiers:\n- disk:\n    path: /x\n    threads: 0\n",
            "kv.yaml:4: tiers.disk: threads must be at least 1",
        ),
        (
            "tiers: [{redis: {url: 'redis://h', tls: {verfy: true}}}]",
            "kv.yaml:1: tiers.redis.tls.verfy: unknown key; did you mean 'verify'?",
        ),
        (
            "tiers: [{redis: {url: 'redis://h', password: 1234}}]",
            "kv.yaml:1: tiers.redis.password: expected text, got a whole number;"
            " write it in quotes",
        ),
        (
            "tiers: [{cpu: {serde: [zip, quant]}}]",
            "kv.yaml:1: tiers.cpu.serde: 'quant' understands tensors and must come first",
        ),
        (
            "exact: true\ntiers:\n- cpu:\n    serde: [quant]\n",
            "kv.yaml:4: tiers.cpu.serde[0]: 'quant' is lossy, and exact: true forbids that",
        ),
        (
            "exact: true\ntiers:\n- cpu:\n    ladder: [[zip], [quant]]\n",
            "kv.yaml:4: tiers.cpu.ladder[1][0]: 'quant' is lossy, and exact: true forbids that",
        ),
        (
            "tiers: [{cpu: {serde: zip, ladder: [[zip], [quant]]}}]",
            "kv.yaml:1: tiers.cpu: serde and ladder are two ways to encode; keep one",
        ),
        (
            "policy: exact\ntiers: [{cpu: {serde: quant}}]",
            "kv.yaml:2: tiers.cpu.serde[0]: 'quant' is lossy, and exact: true forbids that",
        ),
        ("tiers: [diks]", "kv.yaml:1: tiers.diks: no backend 'diks'; did you mean 'disk'?"),
        (
            "tiers: [{cpu: {policy: lur}}]",
            "kv.yaml:1: tiers.cpu.policy: no policy 'lur'; did you mean 'lru'?",
        ),
        (
            "tiers: [{cpu: {wrappers: {braker: {}}}}]",
            "kv.yaml:1: tiers.cpu.wrappers.braker: no wrapper 'braker'; did you mean 'breaker'?",
        ),
        (
            "tiers: [{cpu: {wrappers: [breaker]}}]",
            "kv.yaml:1: tiers.cpu.wrappers: expected a mapping of keys, got a list",
        ),
        (
            "tiers: [{cpu: {quotas: {a: 120%}}}]",
            "kv.yaml:1: tiers.cpu.quotas.a: not a share: '120%' (examples: 25%, 0.25);"
            " or not a size: '120%' (examples: 20GB, 512MiB, 4096)",
        ),
    ],
)
def test_what_is_wrong_with_a_tier_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises((ValueError, LookupError)) as caught:
        read(tmp_path, text)
    assert str(caught.value) == f"{tmp_path}/{message}"
