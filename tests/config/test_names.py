"""Names that users of LMCache know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmcache_core.config import TierConfig, load
from lmcache_core.config.expansion import TIER_KEYS
from lmcache_core.config.names import EXTRA_NOTHING, NAMES, SCHEMES, Effect
from lmcache_core.spi import ConfigError
from tests.config import plugins
from tests.config.plugins import read, registry

# Every key of the in-process configuration of LMCache 0.5.6, by its public documentation.
KNOWN = """
chunk_size local_cpu max_local_cpu_size local_cpu_use_hugepages reserve_local_cpu_size local_disk
local_disk_path_sharding max_local_disk_size remote_url remote_serde use_layerwise save_decode_cache
pre_caching_hash_algorithm save_unfull_chunk enable_blending blend_recompute_ratios blend_thresholds
blend_check_layers blend_min_tokens blend_special_str retrieve_locations store_location enable_p2p p2p_host
p2p_init_ports p2p_lookup_ports mp_host mp_port enable_controller lmcache_instance_id controller_pull_url
controller_reply_url lmcache_worker_ports lmcache_worker_ids lmcache_worker_heartbeat_delay_time
lmcache_worker_heartbeat_time enable_pd pd_role pd_buffer_size pd_buffer_device pd_peer_host
pd_peer_init_port pd_peer_alloc_port pd_peer_query_port pd_proxy_host pd_proxy_port pd_allocation_timeout_sec
pd_shutdown_timeout_sec pd_condition_poll_interval_sec pd_max_prefill_len pd_backend_mode
pd_skip_proxy_notification pd_bidirectional transfer_channel nixl_backends nixl_buffer_size
nixl_buffer_device gds_path gds_buffer_size gds_path_sharding use_gds gds_backend maru_path maru_pool_size
audit_actual_remote_url extra_config internal_api_server_enabled internal_api_server_host
internal_api_server_port_start internal_api_server_include_index_list
internal_api_server_socket_path_prefix blocking_timeout_secs external_lookup_client py_enable_gc cache_policy
numa_mode enable_async_loading priority_limit runtime_plugin_locations storage_plugins
remote_storage_plugins lookup_timeout_ms min_retrieve_tokens hit_miss_ratio lookup_server_worker_ids
enable_scheduler_bypass_lookup script_allowed_imports run_script_api_enabled enable_lazy_memory_allocator
lazy_memory_initial_ratio lazy_memory_expand_trigger_ratio lazy_memory_step_ratio lazy_memory_safe_size
enable_chunk_statistics chunk_statistics_auto_start_statistics chunk_statistics_auto_exit_timeout_hours
chunk_statistics_auto_exit_target_unique_chunks chunk_statistics_strategy enable_kv_events
use_gpu_connector_v3 pin_timeout_sec pin_check_interval_sec remote_config_url app_id
enable_hidden_state_cache max_hidden_state_cpu_size hidden_state_layers hidden_states_retrieve_mode
enable_xpyd controller_url lmcache_worker_port plugin_locations external_backends
force_skip_save log_level track_usage usage_track_url usage_track_interval disable_banner
gpu_staging_buffer_bytes offload_rpc_port enable_nixl_storage nixl_backend nixl_pool_size nixl_path
nixl_path_sharding nixl_backend_params nixl_endpoint_list nixl_async_put nixl_presence_cache
nixl_presence_cache_only nixl_sync_mode nixl_enable_prog_thread
""".split()  # noqa: SIM905  a list of quoted names would be three times as long


def test_every_known_name_has_one_row() -> None:
    keys = [row.key for row in NAMES]
    assert len(set(keys)) == len(keys)
    assert set(KNOWN) <= set(keys)


@pytest.mark.parametrize("row", NAMES, ids=lambda row: row.key)
def test_every_row_says_what_becomes_of_the_name(row: Any) -> None:
    assert bool(row.to) == (row.effect in (Effect.SAME, Effect.MAPPED))
    assert row.why or row.to


@pytest.mark.parametrize(
    "row", [row for row in NAMES if row.effect is Effect.NOTHING], ids=lambda row: row.key
)
def test_a_name_without_effect_is_noted_with_the_reason(tmp_path: Path, row: Any) -> None:
    effective = read(tmp_path, f"{row.key}: 1")
    assert effective.notes == (f"{tmp_path}/kv.yaml:1: {row.key} has no effect: {row.why}",)
    assert effective.config == read(tmp_path, "").config


@pytest.mark.parametrize(
    "row", [row for row in NAMES if row.effect is Effect.REFUSED], ids=lambda row: row.key
)
def test_a_refused_name_says_why_and_may_be_off(tmp_path: Path, row: Any) -> None:
    """Seen in LMCache#2951."""
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, f"{row.key}: something")
    assert str(caught.value) == f"{tmp_path}/kv.yaml:1: {row.key}: not supported: {row.why}"
    assert read(tmp_path, f"{row.key}: false").notes == ()
    assert read(tmp_path, "", env={f"LMCACHE_{row.key.upper()}": "False"}).notes == ()


@pytest.mark.parametrize(
    "row", [row for row in NAMES if row.effect is Effect.ELSEWHERE], ids=lambda row: row.key
)
def test_a_name_that_another_part_reads_is_left_alone(row: Any) -> None:
    engine = {f"lmcache.{row.key}": "x", f"lmcache.{row.key}.port": 1}
    assert load(env={}, engine=engine, registry=registry()).notes == ()


@pytest.mark.parametrize(
    ("written", "key", "value"),
    [
        ("save_decode_cache: true", "save_decode", True),
        ("save_unfull_chunk: true", "save_partial", True),
        ("use_layerwise: true", "layerwise", True),
        ("chunk_size: 16", "chunk_size", 16),
        ("min_retrieve_tokens: 7", "min_retrieve_tokens", 7),
        ("max_tokens_per_load: 7", "max_tokens_per_load", 7),
    ],
)
def test_renamed_keys_of_the_engine(tmp_path: Path, written: str, key: str, value: object) -> None:
    """Seen in vllm#22532."""
    assert getattr(read(tmp_path, written).config.engine, key) == value


def tiers(tmp_path: Path, text: str, **sources: Any) -> tuple[TierConfig, ...]:
    return read(tmp_path, text, **sources).config.tiers


def test_the_usual_short_file(tmp_path: Path) -> None:
    text = """
chunk_size: 256
local_cpu: true
max_local_cpu_size: 2.5
local_cpu_use_hugepages: true
local_disk: "file:///a/,/b/"
max_local_disk_size: 100
remote_url: "redis://cache:6379"
remote_serde: zip
cache_policy: LRU
blocking_timeout_secs: 3
"""
    cpu, disk, redis = tiers(tmp_path, text)
    assert cpu.size == int(2.5 * 2**30)
    assert cpu.options == plugins.CpuOptions(size=cpu.size, huge_pages=True)
    assert disk.options == plugins.DiskOptions(path=(Path("/a/"), Path("/b/")))
    assert disk.size == 100 * 2**30
    assert redis.options == plugins.RedisOptions(url="redis://cache:6379")
    assert redis.serde[0].name == "zip"
    assert {tier.policy for tier in (cpu, disk, redis)} == {"lru"}
    assert {float(tier.deadline) for tier in (cpu, disk, redis)} == {3.0}


def test_all_short_keys_work_from_the_environment(tmp_path: Path) -> None:
    env = {
        "LMCACHE_LOCAL_CPU": "False",
        "LMCACHE_LOCAL_DISK": "/a",
        "LMCACHE_MAX_LOCAL_DISK_SIZE": "1.5",
        "LMCACHE_REMOTE_URL": "fs://host:0/data",
        "LMCACHE_REMOTE_SERDE": "naive",
        "LMCACHE_CACHE_POLICY": "s3fifo",
        "LMCACHE_BLOCKING_TIMEOUT_SECS": "2",
    }
    disk, fs = tiers(tmp_path, "", env=env)
    assert disk.size == int(1.5 * 2**30)
    assert fs.options == plugins.DiskOptions(path=(Path("/data"),))
    assert (disk.policy, fs.serde) == ("s3fifo", ())


def test_sources_of_short_keys_are_shown(tmp_path: Path) -> None:
    effective = read(tmp_path, "max_local_cpu_size: 1", env={"LMCACHE_MAX_LOCAL_CPU_SIZE": "2"})
    (setting,) = [s for s in effective.settings if s.path == "tiers.cpu.size"]
    assert setting.value == "2GiB"
    assert setting.source == "environment LMCACHE_MAX_LOCAL_CPU_SIZE (max_local_cpu_size)"


def test_a_size_with_a_unit_means_what_it_says(tmp_path: Path) -> None:
    assert tiers(tmp_path, "max_local_cpu_size: 3MB")[0].size == 3_000_000


def test_options_of_the_remote_plugin_in_extra_config(tmp_path: Path) -> None:
    text = "remote_url: 's3://bucket'\nextra_config: {s3_region: us, save_chunk_meta: false}"
    effective = read(tmp_path, text)
    assert effective.config.tiers[1].options == plugins.S3Options(url="s3://bucket", region="us")
    assert effective.notes == (
        f"{tmp_path}/kv.yaml:2: extra_config.save_chunk_meta has no effect:"
        f" {EXTRA_NOTHING['save_chunk_meta']}",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("local_disk: /a", "kv.yaml:1: local_disk: needs max_local_disk_size (in GiB) beside it"),
        ("max_local_cpu_size: -1", "kv.yaml:1: max_local_cpu_size: not a size in GiB: -1"),
        ("max_local_cpu_size: 3GXB", "kv.yaml:1 (max_local_cpu_size): tiers.cpu.size: unknown unit 'GXB' in size '3GXB'; did you mean GB?"),
        ("remote_url: ftp://x", f"kv.yaml:1: remote_url: no plugin for 'ftp'; known: {', '.join(sorted(SCHEMES))}"),
        ("remote_url: redis-sentinels://x", "kv.yaml:1: remote_url: no plugin for 'redis-sentinels'; did you mean redis-sentinel://?"),
        ("remote_url: valkey_cluster://x", "kv.yaml:1: remote_url: no plugin for 'valkey_cluster'; did you mean valkey-cluster://?"),
        ("remote_url: memcache://x", "kv.yaml:1: remote_url: no plugin for 'memcache'; did you mean memcached://?"),
        ("remote_url: cache", f"kv.yaml:1: remote_url: no plugin for 'no scheme'; known: {', '.join(sorted(SCHEMES))}"),
        ("remote_serde: zip", "kv.yaml:1: remote_serde: needs remote_url beside it"),
        ("remote_url: redis://x\nextra_config: {a: 1}", "kv.yaml:2: extra_config.a: unknown key; options of redis begin with redis_"),
        ("remote_url: redis://x\nextra_config: 3", "kv.yaml:2: extra_config: expected a mapping of keys, got a whole number"),
        ("remote_url: redis://x\nextra_config: {redis_prefx: 1}", "kv.yaml:2: tiers.redis.prefx: unknown key; did you mean 'prefix'?"),
        ("tiers: [cpu]\nmax_local_cpu_size: 1", "kv.yaml:2: max_local_cpu_size: cannot stand beside tiers (@/kv.yaml:1); write it there"),
        ("save_decode: true\nsave_decode_cache: true", "kv.yaml:2: save_decode_cache: is the same setting as save_decode, which is given too; keep one"),
        ("cache_policy: LRUX", "kv.yaml:1 (cache_policy): tiers.cpu.policy: no policy 'lrux'; did you mean 'lru'?"),
        ("cache_policy: [lru]", "kv.yaml:1: cache_policy: expected a single value, got a list"),
        ("local_disk: 5\nmax_local_disk_size: 1", "kv.yaml:1: local_disk: expected text, got a whole number; write it in quotes"),
        ("remote_url: {a: 1}", "kv.yaml:1: remote_url: expected a single value, got a mapping"),
        ("nixl_path: /a", "kv.yaml:1: nixl_path: needs enable_nixl_storage beside it"),
        ("enable_nixl_storage: true\nnixl_path: /a", "kv.yaml:2: nixl_path: needs max_local_disk_size (in GiB) beside it"),
        ("nixl_path: /a\nextra_config: {nixl_path: /a}", "kv.yaml:2: nixl_path: is the same setting as nixl_path, which is given too; keep one"),
        ("extra_config: {nixl_endpoint_list: [a]}", "kv.yaml:1: nixl_endpoint_list: not supported: write a rail per endpoint (tiers: [{nixl: {rails: [...]}}])"),
        ("policy: arc", "kv.yaml:1: policy: unknown key; it belongs to a tier: tiers: [{PLUGIN: {policy: ...}}]"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_short_key_is_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises((ConfigError, LookupError)) as caught:
        read(tmp_path, text)
    assert str(caught.value) == f"{tmp_path}/{message.replace('@', str(tmp_path))}"


FILES = """
max_local_disk_size: 10
nixl_buffer_device: cpu
extra_config:
  enable_nixl_storage: true
  nixl_backend: GDS_MT
  nixl_pool_size: 64
  nixl_path: /mnt/nixl/
  nixl_backend_params: {use_uring: "true"}
"""


def test_values_through_nixl_in_files(tmp_path: Path) -> None:
    _, nixl = tiers(tmp_path, FILES)
    assert nixl.size == 10 * 2**30
    assert nixl.options == plugins.NixlOptions(
        backend="GDS_MT", path="/mnt/nixl/", params={"use_uring": "true"}
    )
    notes = read(tmp_path, FILES).notes
    assert [note.split()[1] for note in notes] == ["nixl_buffer_device", "nixl_pool_size"]


def test_values_through_nixl_in_several_folders(tmp_path: Path) -> None:
    _, nixl = tiers(tmp_path, FILES.replace("/mnt/nixl/", '"/a, file:///b"'))
    assert nixl.size == 10 * 2**30
    rails = [(rail.backend, rail.path, rail.params) for rail in nixl.options.rails]  # type: ignore[attr-defined]
    assert rails == [("GDS_MT", path, {"use_uring": "true"}) for path in ("/a", "/b")]


def test_values_through_nixl_in_objects(tmp_path: Path) -> None:
    params = "{access_key: a, secret_key: b, bucket: c}"
    env = {
        "LMCACHE_ENABLE_NIXL_STORAGE": "True",
        "LMCACHE_NIXL_BACKEND": "OBJ",
        "LMCACHE_NIXL_PATH": "/not/used",
        "LMCACHE_NIXL_BACKEND_PARAMS": params,
    }
    nested = {"LMCACHE_EXTRA_CONFIG": "{enable_nixl_storage: true, nixl_backend: OBJ,"
              f" nixl_backend_params: {params}}}"}  # fmt: skip
    for given in (env, nested):
        _, nixl, disk = tiers(tmp_path, "local_disk: /d\nmax_local_disk_size: 1", env=given)
        assert (nixl.plugin, nixl.size, disk.plugin) == ("nixl", None, "disk")
        options = nixl.options
        assert isinstance(options, plugins.NixlOptions)
        assert (options.backend, options.path, options.params) == ("OBJ", "", {"bucket": "c"})
        assert [options.access_key.reveal(), options.secret_key.reveal()] == ["a", "b"]


def test_values_through_nixl_can_be_switched_off(tmp_path: Path) -> None:
    (cpu,) = tiers(tmp_path, FILES.replace("true\n", "false\n"))
    assert cpu.plugin == "cpu"
    text = FILES + "  redis_prefix: x\nremote_url: redis://cache\n"
    assert [tier.plugin for tier in tiers(tmp_path, text)] == ["cpu", "nixl", "redis"]


def test_no_memory_tier_can_be_asked_for(tmp_path: Path) -> None:
    assert tiers(tmp_path, "local_cpu: false") == ()


def test_every_short_tier_key_is_used_somewhere_here() -> None:
    here = Path(__file__).read_text().lower()
    assert [key for key in TIER_KEYS if here.count(key) < 2 and key != "gds_path"] == []


def test_gds_is_named_when_it_is_missing(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match=r"tiers\.gds: no backend 'gds'"):
        read(tmp_path, "gds_path: /a\nmax_local_disk_size: 1")
