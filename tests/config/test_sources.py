"""Where values come from and which of them wins."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.config import Effective, EngineConfig, ManagerConfig, Quality, VerifyHot, load
from lmcache_core.spi import ConfigError, Duration
from tests.config.plugins import read, registry


def source_of(effective: Effective, path: str) -> str:
    (setting,) = [s for s in effective.settings if s.path == path]
    return setting.source


def test_each_later_source_wins_key_by_key(tmp_path: Path) -> None:
    """Seen in LMCache#1572."""
    text = "chunk_size: 1\nmin_store_tokens: 1\nsave_partial: true\nexact: true\n"
    effective = read(
        tmp_path,
        text,
        env={"LMCACHE_CHUNK_SIZE": "2", "LMCACHE_MIN_STORE_TOKENS": "2", "HOME": "/root"},
        engine={"lmcache.chunk_size": 3, "lmcache.save_partial": False, "use_layerwise": True},
        flags={"chunk_size": "4"},
    )
    engine = effective.config.engine
    assert engine.chunk_size == 4
    assert engine.min_store_tokens == 2
    assert engine.save_partial is False
    assert engine.exact is True
    assert source_of(effective, "chunk_size") == "flag chunk_size"
    assert source_of(effective, "min_store_tokens") == "environment LMCACHE_MIN_STORE_TOKENS"
    assert source_of(effective, "save_partial") == "engine lmcache.save_partial"
    assert source_of(effective, "exact") == f"{tmp_path}/kv.yaml:4"
    assert source_of(effective, "layerwise") == "default"


def test_the_file_is_named_by_the_environment_or_by_the_caller(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("chunk_size: 16")
    two.write_text('{"chunk_size": 32}')
    env = {"LMCACHE_CONFIG_FILE": str(one)}
    assert load(env=env, registry=registry()).config.engine.chunk_size == 16
    assert load(two, env=env, registry=registry()).config.engine.chunk_size == 32


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    env = {"LMCACHE_CONFIG_FILE": f"{tmp_path}/none.yaml"}
    with pytest.raises(ConfigError) as caught:
        load(env=env)
    assert str(caught.value) == (
        f"LMCACHE_CONFIG_FILE names {tmp_path}/none.yaml: cannot be read: No such file or directory"
    )


def test_what_is_no_regular_file_is_an_error_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    for name in (tmp_path, tmp_path / "fifo.yaml", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=f"^{name}: cannot be read: it is no regular file$"):
            load(name, env={})


def test_a_file_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "kv.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"kv\.yaml: cannot be read: it is not UTF-8 text$"):
        load(tmp_path / "kv.yaml", env={})


def engine_samples() -> list[tuple[str, str, Any]]:
    samples: dict[str, tuple[str, Any]] = {
        "chunk_size": ("64", 64),
        "save_partial": ("true", True),
        "save_decode": ("on", True),
        "min_retrieve_tokens": ("5", 5),
        "min_store_tokens": ("5", 5),
        "max_tokens_per_load": ("5", 5),
        "verify_hot": ("off", VerifyHot.OFF),
        "exact": ("true", True),
        "quality": ("refuse", Quality.REFUSE),
        "quality_kl": ("0.01", 0.01),
        "quality_report": ("it.json", "it.json"),
        "tags_in_key": ("a, b", ("a", "b")),
        "key_managers": ("[region]", ("region",)),
        "layerwise": ("true", True),
        "load_failure_policy": ("keep", "keep"),
    }
    return [(field.name, *samples[field.name]) for field in fields(EngineConfig)]


@pytest.mark.parametrize(("key", "written", "expected"), engine_samples())
def test_every_key_of_the_engine_has_an_environment_form(
    key: str, written: str, expected: Any
) -> None:
    """Seen in LMCache#257."""
    effective = load(env={f"LMCACHE_{key.upper()}": written}, registry=registry())
    value = getattr(effective.config.engine, key)
    if key == "key_managers":
        value = tuple(choice.name for choice in value)
    assert getattr(value, "value", value) == getattr(expected, "value", expected)


@pytest.mark.parametrize("field", fields(ManagerConfig), ids=lambda field: field.name)
def test_every_key_of_the_manager_has_an_environment_form(field: Any) -> None:
    written = "false" if field.name == "cost_gate" else "0.125"
    effective = load(env={f"LMCACHE_MANAGER__{field.name.upper()}": written}, registry=registry())
    assert getattr(effective.config.manager, field.name) == (written != "false" and 0.125)


def test_the_other_sections_have_an_environment_form() -> None:
    config = load(
        env={
            "LMCACHE_TIERS": "[{disk: {path: /kv, size: 1GiB}}, cpu]",
            "LMCACHE_TENANTS__ACME__QUOTA": "10%",
            "LMCACHE_PLUGINS__DENY": "s3,gcs",
            "LMCACHE_OBSERVERS": "watch",
            "LMCACHE_LOG_LEVEL": "DEBUG",
        },
        registry=registry(),
    ).config
    assert [tier.name for tier in config.tiers] == ["disk", "cpu"]
    assert config.tenants["acme"].quota == 0.1
    assert config.plugins.deny == ("s3", "gcs")
    assert config.observers[0].name == "watch"
    assert config.log_level == "debug"


def test_one_key_of_one_tier_can_be_changed(tmp_path: Path) -> None:
    text = "tiers:\n- cpu: {size: 1GiB, promote: false}\n- disk: {path: /kv}\n"
    effective = read(
        tmp_path,
        text,
        env={"LMCACHE_TIERS__CPU__SIZE": "2GiB"},
        engine={"lmcache.tiers.disk.path": ["/a", "/b"]},
        flags={"tiers.disk.ttl": "1h"},
    )
    cpu, disk = effective.config.tiers
    assert (cpu.size, cpu.promote) == (2 * 2**30, False)
    assert [str(path) for path in disk.options.path] == ["/a", "/b"]  # type: ignore[attr-defined]
    assert disk.ttl == Duration(3600)
    assert source_of(effective, "tiers.cpu.size") == "environment LMCACHE_TIERS__CPU__SIZE"
    assert source_of(effective, "tiers.cpu.promote") == f"{tmp_path}/kv.yaml:2"


def test_a_list_of_tiers_replaces_the_earlier_one(tmp_path: Path) -> None:
    config = read(
        tmp_path, "tiers: [cpu, {disk: {path: /kv}}]", engine={"lmcache.tiers": ["cpu"]}
    ).config
    assert [tier.name for tier in config.tiers] == ["cpu"]


def test_the_default_tier_can_be_changed_too() -> None:
    (tier,) = load(env={"LMCACHE_TIERS__CPU__SIZE": "1GiB"}, registry=registry()).config.tiers
    assert tier.size == 2**30


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (
            {"env": {"LMCACHE_CHUNK_SIZES": "1"}},
            "environment LMCACHE_CHUNK_SIZES: chunk_sizes: unknown key; did you mean 'chunk_size'?",
        ),
        (
            {"env": {"LMCACHE_CHUNK_SIZE": "many"}},
            "environment LMCACHE_CHUNK_SIZE: chunk_size: expected a whole number, got text",
        ),
        (
            {"env": {"LMCACHE_TIERS": "[{cpu"}},
            "environment LMCACHE_TIERS:1: not YAML: expected ',' or '}', but got '<stream end>'",
        ),
        (
            {"env": {"LMCACHE_TIERS": "4"}},
            "environment LMCACHE_TIERS: tiers: expected a list,"
            " one item `- PLUGIN: {options}` per tier",
        ),
        (
            {"env": {"LMCACHE_TIERS__DISK__SIZE": "4GB"}},
            "environment LMCACHE_TIERS__DISK__SIZE: tiers.disk: no such tier; there are: cpu",
        ),
        (
            {"env": {"LMCACHE_LOG_LEVEL": "loud"}},
            "environment LMCACHE_LOG_LEVEL: log_level: not one of the choices: 'loud';"
            " valid: debug, info, warning, error",
        ),
        (
            {"engine": {"lmcache.chunksize": 1}},
            "engine lmcache.chunksize: chunksize: unknown key; did you mean 'chunk_size'?",
        ),
        (
            {"engine": {"lmcache.chunk_size": 2.5}},
            "engine lmcache.chunk_size: chunk_size: expected a whole number, got a number",
        ),
        (
            {"flags": {"manager.dirty_cap": "2"}},
            "flag manager.dirty_cap: manager.dirty_cap: not a share: '2' (examples: 25%, 0.25)",
        ),
        (
            {"env": {"LMCACHE_DAEMON__PORT": "99999"}},
            "environment LMCACHE_DAEMON__PORT: daemon: port is 1 to 65535, not 99999",
        ),
        (
            {"flags": {"chunk_size": "0"}},
            "flag chunk_size: chunk_size must be at least 1, not 0",
        ),
        (
            {"flags": {"dirty_cap": "20%"}},
            "flag dirty_cap: dirty_cap: unknown key; did you mean manager.dirty_cap?",
        ),
        (
            {"flags": {"engine.chunk_size": "1"}},
            "flag engine.chunk_size: engine: unknown key; its keys stand at the top level",
        ),
        (
            {"flags": {"wholly_different": "1"}},
            "flag wholly_different: wholly_different: unknown key; valid: chunk_size,",
        ),
        (
            {"flags": {"quality_report": "a\0b"}},
            "flag quality_report: quality_report: holds a NUL character",
        ),
    ],
)
def test_the_source_of_a_mistake_is_named(sources: Any, message: str) -> None:
    """Seen in LMCache#447."""
    with pytest.raises(ConfigError) as caught:
        load(**{"env": {}, "registry": registry(), **sources})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_names_that_other_parts_or_the_platform_put_there_are_left_alone() -> None:
    """Seen in dynamo#2079."""
    env = {
        "LMCACHE_PLUGINS": "cpu",
        "LMCACHE_TEST_SERVICES": "redis",
        "LMCACHE_SERVICE_HOST": "10.0.0.1",
        "LMCACHE_SERVICE_PORT": "80",
        "LMCACHE_SERVICE_PORT_HTTP": "80",
        "LMCACHE_PORT": "tcp://10.0.0.1:80",
        "LMCACHE_PORT_80_TCP": "tcp://10.0.0.1:80",
        "LMCACHE_PORT_80_TCP_PROTO": "tcp",
        "LMCACHE_REDIS_PORT_6379_TCP_ADDR": "10.0.0.1",
        "LMCACHE_REDIS_SERVICE_PORT": "6379",
    }
    assert load(env=env, registry=registry()).config == load(env={}, registry=registry()).config


def test_permissions_of_the_configuration_reach_the_registry(tmp_path: Path) -> None:
    (tmp_path / "kv.yaml").write_text("tiers: []\nplugins: {allow: [cpu], deny: [s3]}")
    effective = load(tmp_path / "kv.yaml", env={"LMCACHE_PLUGINS": "cpu"})
    refusals = [effective.registry.refusal(o) for o in registry().offers("backends")]
    assert [refusal is None for refusal in refusals].count(True) == 1
