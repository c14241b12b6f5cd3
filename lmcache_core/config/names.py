"""Names that users of LMCache know: what each of them does here. The table is also the documentation's."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum


class Effect(Enum):
    """What becomes of a known name."""

    SAME = "same"
    MAPPED = "mapped"
    NOTHING = "no effect"
    REFUSED = "refused"
    """Unless it is switched off, which is as if it were not there."""
    ELSEWHERE = "elsewhere"
    """Read by another part, not by the configuration."""


@dataclass(frozen=True, slots=True)
class Name:
    """One row: a key (its environment form is ``LMCACHE_`` and upper case), and its effect.

    ``to`` is the key it stands for here, or the tier that it becomes; ``why`` explains the other effects.
    """

    key: str
    effect: Effect
    to: str = ""
    why: str = ""


def _rows(effect: Effect, why: str, *keys: str) -> tuple[Name, ...]:
    return tuple(Name(key, effect, why=why) for key in keys)


_S, _M, _N, _R, _E = Effect
_LATER = "this version has no part that does it"

NAMES: tuple[Name, ...] = (
    *(Name(key, _S, key) for key in (
        "chunk_size", "min_retrieve_tokens", "max_tokens_per_load", "load_failure_policy", "log_level",
    )),
    Name("save_decode_cache", _M, "save_decode"),
    Name("save_unfull_chunk", _M, "save_partial"),
    Name("use_layerwise", _M, "layerwise"),
    Name("local_cpu", _M, "tier cpu"),
    Name("max_local_cpu_size", _M, "tier cpu: size", "in GiB; per worker, as ever"),
    Name("local_cpu_use_hugepages", _M, "tier cpu: huge_pages"),
    Name("local_disk", _M, "tier disk: path", "a folder, file:// or several with commas"),
    Name("max_local_disk_size", _M, "tier disk: size", "in GiB"),
    Name("gds_path", _M, "tier gds: path"),
    Name("enable_nixl_storage", _M, "tier nixl"),
    Name("nixl_backend", _M, "tier nixl: backend"),
    Name("nixl_path", _M, "tier nixl: path", "a folder, or several with commas; max_local_disk_size is their limit, too"),
    Name("nixl_backend_params", _M, "tier nixl: params", "access_key and secret_key become options of the tier"),
    Name("remote_url", _M, "tier by scheme: url"),
    Name("remote_serde", _M, "that tier: serde", "naive is none"),
    Name("cache_policy", _M, "all these tiers: policy"),
    Name("blocking_timeout_secs", _M, "all these tiers: deadline"),
    Name("extra_config", _M, "options of the remote tier", "keys that begin with the plugin's name; NIXL's stand in it or beside it"),
    *_rows(_N, "chunk digests are SHA-256, equal in every process", "pre_caching_hash_algorithm"),
    *_rows(_N, "a lookup is bounded by manager.lookup_budget and each tier's deadline", "lookup_timeout_ms"),
    *_rows(_N, "every load is asynchronous where the engine allows it", "enable_async_loading"),
    *_rows(_N, "memory is populated in the background from the start",
           "enable_lazy_memory_allocator", "lazy_memory_initial_ratio", "lazy_memory_expand_trigger_ratio",
           "lazy_memory_step_ratio", "lazy_memory_safe_size", "reserve_local_cpu_size"),
    *_rows(_N, "folders are shared by all workers of a node", "local_disk_path_sharding", "gds_path_sharding",
           "nixl_path_sharding"),
    *_rows(_N, "files and objects are made when they are needed, up to max_local_disk_size", "nixl_pool_size"),
    *_rows(_N, "it is settled without a switch", "nixl_async_put", "nixl_presence_cache",
           "nixl_presence_cache_only", "nixl_sync_mode", "nixl_enable_prog_thread"),
    *_rows(_N, "transfers go straight between arena memory and tier",
           "gds_buffer_size", "nixl_buffer_size", "nixl_buffer_device", "gpu_staging_buffer_bytes"),
    *_rows(_N, "a lease ends with its owner, not with time", "pin_timeout_sec", "pin_check_interval_sec"),
    *_rows(_N, "Python's garbage collector is left alone", "py_enable_gc"),
    *_rows(_N, "the connector for the device is found by itself",
           "use_gpu_connector_v3", "use_gds", "gds_backend", "device_backend"),
    *_rows(_N, "memory lies where the kernel puts it; set numa_node of the tier", "numa_mode"),
    *_rows(_N, "there is one lookup, answered from the node's index",
           "lookup_server_worker_ids", "enable_scheduler_bypass_lookup", "hit_miss_ratio", "priority_limit"),
    *_rows(_N, "instances have unique names of their own", "lmcache_instance_id"),
    *_rows(_N, "metrics and events are always on", "enable_chunk_statistics",
           "chunk_statistics_auto_start_statistics", "chunk_statistics_auto_exit_timeout_hours",
           "chunk_statistics_auto_exit_target_unique_chunks", "chunk_statistics_strategy", "enable_kv_events"),
    *_rows(_N, "nothing is sent out and nothing is printed unasked", "track_usage", "usage_track_url",
           "usage_track_interval", "disable_banner"),
    *_rows(_N, "there is no controller; nodes and the daemon find each other by themselves",
           "lmcache_worker_ports", "lmcache_worker_port", "lmcache_worker_ids",
           "lmcache_worker_heartbeat_delay_time", "lmcache_worker_heartbeat_time"),
    *_rows(_N, "of no use without what it belongs to", "app_id", "blend_recompute_ratios", "blend_thresholds",
           "blend_check_layers", "blend_min_tokens", "blend_special_str", "p2p_host", "p2p_init_ports",
           "p2p_lookup_ports", "pd_role", "pd_buffer_size", "pd_buffer_device", "pd_peer_host",
           "pd_peer_init_port", "pd_peer_alloc_port", "pd_peer_query_port", "pd_proxy_host", "pd_proxy_port",
           "pd_allocation_timeout_sec", "pd_shutdown_timeout_sec", "pd_condition_poll_interval_sec",
           "pd_max_prefill_len", "pd_backend_mode", "pd_skip_proxy_notification", "pd_bidirectional",
           "transfer_channel", "nixl_backends", "maru_pool_size", "max_hidden_state_cpu_size",
           "hidden_state_layers", "hidden_states_retrieve_mode", "controller_pull_url", "controller_url",
           "controller_reply_url", "internal_api_server_host", "internal_api_server_port_start",
           "internal_api_server_include_index_list", "internal_api_server_socket_path_prefix",
           "offload_rpc_port"),
    *_rows(_R, _LATER, "enable_blending", "enable_p2p", "enable_pd", "enable_xpyd", "enable_controller",
           "enable_hidden_state_cache", "maru_path"),
    *_rows(_R, "write a rail per endpoint (tiers: [{nixl: {rails: [...]}}])", "nixl_endpoint_list"),
    *_rows(_R, "write the tiers in lookup order (tiers: [...])", "retrieve_locations", "store_location",
           "audit_actual_remote_url"),
    *_rows(_R, "plugins are installed distributions; name one as a tier (tiers: [{NAME: {...}}])",
           "storage_plugins", "external_backends", "remote_storage_plugins", "runtime_plugin_locations",
           "plugin_locations", "external_lookup_client"),
    *_rows(_R, "nothing here runs code that comes over the network", "run_script_api_enabled",
           "script_allowed_imports"),
    *_rows(_R, "configuration is never fetched; use a file, the environment or the engine", "remote_config_url"),
    *_rows(_R, "the daemon has the HTTP interface (lmcache server)", "internal_api_server_enabled"),
    *_rows(_R, "ask for it per request (lmcache.skip_save)", "force_skip_save"),
    Name("mp_host", _M, "daemon.host"),
    Name("mp_port", _M, "daemon.port"),
    Name("mp_transfer_mode", _M, "daemon.transfer"),
    *_rows(_E, "the engine connector reads it", "mp", "use_upstream_mp", "lazy_offload"),
)  # fmt: skip  # a table reads better than one name per line

BY_KEY = {row.key: row for row in NAMES}

EXTRA_NOTHING = dict.fromkeys(
    ("save_chunk_meta", "use_exists_sync", "remote_enable_mla_worker_id_as0", "save_only_first_rank",
     "force_store_wait", "lookup_backoff_time", "kv_msg_batch_size", "kv_msg_batch_timeout", "enable_sparse",
     "first_rank_max_local_cpu_size", "disk_io_threads", "use_odirect", "use_direct_io"),
    "it is settled without a switch",
)  # fmt: skip
"""Keys of ``extra_config`` that are accepted without effect, with the reason."""

SCHEMES: dict[str, tuple[str, str]] = {
    **{f"{server}{tls}{way}": (server, "url") for server in ("redis", "valkey") for tls in ("", "s")
       for way in ("", "-cluster", "-sentinel")},
    **dict.fromkeys(("resp", "unix"), ("redis", "url")),
    "memcached": ("memcached", "server"),
    "lm": ("lmcache", "url"),
    "infinistore": ("infinistore", "url"),
    "mooncakestore": ("mooncake", "url"),
    "s3": ("s3", "url"),
    "gs": ("gs", "url"),
    **dict.fromkeys(("az", "azure"), ("az", "url")),
    "bigtable": ("bigtable", "url"),
    "fs": ("fs", "path"),
    "hf3fs": ("hf3fs", "path"),
}  # fmt: skip
"""Scheme of ``remote_url`` to plugin, and to the option that takes the URL or its path."""


def by_scheme(scheme: str, /) -> tuple[str, str]:
    """Plugin and option of a scheme.

    Raises:
        LookupError: there is none; the message has the nearest one, or all.
    """
    if scheme in SCHEMES:
        return SCHEMES[scheme]
    near = get_close_matches(scheme, SCHEMES, 1)
    hint = f"did you mean {near[0]}://?" if near else f"known: {', '.join(sorted(SCHEMES))}"
    raise LookupError(f"no plugin for {scheme or 'no scheme'!r}; {hint}")


NOT_SETTINGS = (
    "config_file", "daemon", "runtime_dir", "plugins", "debug", "native", "tests", "sanitize", "bindings", "no_budgets", "vllm_env",
)  # fmt: skip
NOT_SETTINGS_PREFIXES = (
    "test_", "bench_", "demo_", "ci_", "server_", "coordinator_", "resp_", "ec_", "runtime_plugin_", "native_",
)  # fmt: skip
"""Environment names that other parts read."""
