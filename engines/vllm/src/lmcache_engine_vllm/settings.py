"""Which cache an engine uses: configuration, daemon, and whose engine it is."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import distributions
from typing import Any

from lmcache_core import __version__
from lmcache_core.config import load
from lmcache_core.engine import Cache
from lmcache_core.spi import ConfigError
from lmcache_core.wire.client import DaemonClient

LOG = logging.getLogger("lmcache.vllm")
MP = "lmcache.mp."
MP_KNOWN = {"host": "daemon.host", "port": "daemon.port", "mp_transfer_mode": "daemon.transfer"}
MP_SETTLED = {
    "mq_timeout", "heartbeat_interval", "nonblocking_lookup_status", "isolated_ipc", "use_vmm_api",
    "hash_algorithm", "lazy_offload", "autostart", "autostart.server_args", "autostart.wait_timeout",
}  # fmt: skip
"""Keys of other releases for what is settled here without a switch."""
PLAIN = {"use_layerwise", "use_native"}
"""Keys without a prefix that vLLM reads too."""
OWN = {
    "skip_last_n_tokens", "save_decode_cache", "discard_partial_chunks", "canary", "async_load",
    "eager_prefetch",
}  # fmt: skip
"""Keys of ``lmcache.NAME`` that only this connector reads; the rest are the cache's own."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user wrote for this connector.

    Attributes:
        engine: name under which its ranks and its scheduler meet at the daemon.
        loads, stores: by the role.
        skip_last: so many tokens at the end of a prompt are not kept.
        canary: share of hits that are computed again and compared.
        background: loads do not hold back a forward pass.
        eager: lower tiers bring values up from the moment a request comes, not from its turn.
        shared: where no daemon is named, one that others started is meant, not a private one.
        workers: of this engine.
        events: vLLM publishes what is kept.
    """

    engine: str
    loads: bool
    stores: bool
    skip_last: int
    canary: float
    background: bool
    eager: bool
    layerwise: bool
    shared: bool
    workers: int
    events: bool
    extra: Mapping[str, Any]


def read(config: Any, *, shared: bool) -> Settings:
    """Read vLLM's ``VllmConfig``.

    Args:
        shared: the name that was asked for stands for a daemon of its own.

    Raises:
        ConfigError: a value that makes no sense.
    """
    transfer = config.kv_transfer_config
    written = dict(transfer.kv_connector_extra_config or {})
    own = {name: written.pop(f"lmcache.{name}", written.pop(name, None)) for name in OWN}
    extra = {name: value for name, value in written.items() if name.startswith("lmcache.")}
    mp = {name.removeprefix(MP): extra.pop(name) for name in list(extra) if name.startswith(MP)}
    for name, key in MP_KNOWN.items():
        if name in mp:
            extra[f"lmcache.{key}"] = mp[name]
    if own["save_decode_cache"] is None:
        own["save_decode_cache"] = mp.pop("save_decode_cache", None)
    if own["eager_prefetch"] is None:
        own["eager_prefetch"] = mp.pop("eager_prefetch", None)
    for name in sorted(mp.keys() - MP_KNOWN.keys()):
        if name not in MP_SETTLED:
            near = get_close_matches(name, [*MP_KNOWN, *MP_SETTLED], 1)
            known = f"did you mean {MP}{near[0]}?" if near else f"known: {', '.join(MP_KNOWN)}"
            raise ConfigError(f"{MP}{name}: unknown key; {known}")
        LOG.warning("%s%s has no effect: it is settled without a switch", MP, name)
    for name in sorted(written.keys() - PLAIN):
        if not name.startswith("lmcache."):
            LOG.warning("%s has no effect: keys of the cache begin with lmcache.", name)
    if own["save_decode_cache"] is not None:
        extra["lmcache.save_decode_cache"] = own["save_decode_cache"]
    if own["discard_partial_chunks"] is not None:
        extra["lmcache.save_partial"] = not own["discard_partial_chunks"]
    workers = config.parallel_config.world_size
    size = getattr(config.cache_config, "kv_offloading_size", None)
    if size and getattr(config.cache_config, "kv_offloading_backend", "") == "lmcache":
        shared = shared and "host" in mp
        extra.setdefault("lmcache.max_local_cpu_size", size / workers)
    publishing = getattr(config, "kv_events_config", None)
    return Settings(
        engine=str(transfer.engine_id)[:200],
        loads=bool(transfer.is_kv_consumer),
        stores=bool(transfer.is_kv_producer),
        skip_last=_number("skip_last_n_tokens", own["skip_last_n_tokens"] or 0),
        canary=_share("canary", own["canary"] or 0),
        background=bool(own["async_load"]),
        eager=bool(own["eager_prefetch"]),
        layerwise=bool(written.get("use_layerwise") or extra.get("lmcache.use_layerwise")),
        shared=shared,
        workers=workers,
        events=bool(getattr(publishing, "enable_kv_cache_events", False)),
        extra=extra,
    )


def open_cache(settings: Settings) -> tuple[Cache, DaemonClient]:
    """Reach the cache, starting a private daemon when it is not there.

    Raises:
        ConfigError, PluginError, Unavailable: it cannot work; one line says why.
    """
    refuse_others()
    show_log()
    effective = load(engine=settings.extra)
    if not effective.config.daemon.address and not effective.config.daemon.private:
        where: dict[str, Any] = {"private": True, "workers": settings.workers}
        if settings.shared:
            where = {"host": "tcp://localhost"}
        given = {f"lmcache.daemon.{key}": value for key, value in where.items()}
        effective = load(engine={**settings.extra, **given})
    cache = Cache(effective)
    if not isinstance(cache.storage, DaemonClient):
        raise ConfigError(
            "vLLM's processes meet at a daemon; daemon.private: false needs a host or socket"
        )
    if cache.config.engine.exact and cache.fidelity != "exact":
        cache.close()
        raise ConfigError(
            f"the daemon has lossy tiers ({cache.fidelity}), and exact: true forbids that"
        )
    return cache, cache.storage


def refuse_others() -> None:
    """Another ``lmcache`` in this environment would answer in our place.

    Raises:
        ConfigError: says how to remove it.
    """
    for found in distributions(name="lmcache"):
        if found.version != __version__:
            raise ConfigError(
                f"lmcache {found.version} is installed beside lmcache {__version__}; "
                "remove both and install this one again: pip uninstall -y lmcache"
            )


def show_log() -> None:
    """Let our lines appear where vLLM's do."""
    ours, theirs = logging.getLogger("lmcache"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers[:] = theirs.handlers
        ours.propagate = False
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)


def _number(name: str, value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = -1
    if number < 0:
        raise ConfigError(f"lmcache.{name} is a number of tokens, not {value!r}")
    return number


def _share(name: str, value: Any) -> float:
    try:
        share = float(value)
    except (TypeError, ValueError):
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"lmcache.{name} is a share from 0 to 1, not {value!r}")
    return share
