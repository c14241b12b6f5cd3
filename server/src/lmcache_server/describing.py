"""The document behind ``lmcache describe``."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from lmcache_core import __version__
from lmcache_core.storage.build import BREAKER_STATES, fidelity
from lmcache_server import spaces

if TYPE_CHECKING:
    from lmcache_server.daemon import Daemon

BREAKERS = {number: name for name, number in BREAKER_STATES.items()}


def document(daemon: Daemon) -> bytes:
    """Everything about a daemon that is no metric, as JSON."""
    manager, config = daemon.manager, daemon.effective.config
    manager.measure()
    snapshot = manager.metrics.snapshot()
    serving = {tier.name for tier in manager.tiers}
    _, configured = daemon.builder.parted(daemon.builder.config.tiers)
    plugins = {each.name: each.plugin for each in configured}
    serdes = {
        each.name: [choice.name for chain in each.chains for choice in chain] for each in configured
    }
    tiers = [
        {
            "name": name,
            "plugin": plugins.get(name, ""),
            "serde": serdes.get(name, []),
            "enabled": name in serving,
            "breaker": BREAKERS[int(snapshot.total("lmcache_tier_breaker", tier=name))],
            "bytes": int(snapshot.total("lmcache_tier_resident_bytes", tier=name)),
            "chunks": int(snapshot.total("lmcache_tier_chunks", tier=name)),
            "limit": int(snapshot.total("lmcache_tier_limit_bytes", tier=name)),
        }
        for name in dict.fromkeys([*(tier.name for tier in manager.tiers), *plugins])
    ]
    stock = manager.pool.accounting()
    document = {
        "version": __version__,
        "boot": daemon.boot.hex(),
        "pid": os.getpid(),
        "started": daemon.begun,
        "socket": daemon.options.path,
        "tcp": f"{daemon.options.host}:{daemon.options.port}" if daemon.options.port else None,
        "token": bool(daemon.options.token),
        "arena_mode": daemon.options.mode,
        "chunk_size": config.engine.chunk_size,
        "fidelity": fidelity(config, daemon.effective.registry),
        "frozen": manager.frozen,
        "memory": {
            "tier": manager.context.tier,
            **{name: getattr(stock, name) for name in stock.__slots__ if name != "usage"},
        },
        "tenants": {name or "default": nbytes for name, nbytes in stock.usage.items()},
        "quotas": daemon.quotas,
        "tiers": tiers,
        "pins": {
            "values": len(daemon.pins),
            "bytes": daemon.pins.nbytes,
            "limit": daemon.pins.limit,
        },
        "spaces": spaces.document(daemon),
        "clients": [
            {
                "name": session.name,
                "pid": session.pid,
                "connections": len(session.connections),
                "leases": len(session.leases),
                "reservations": len(session.reservations),
            }
            for session in daemon.sessions.by_token.values()
        ],
        "engines": {
            engine.name: {
                "ranks": engine.ranks,
                "missing": engine.missing,
                "space": spaces.digest_of(engine.space) if engine.space else "",
                "root": spaces.root_of(engine.space) if engine.space else "",
                "chunk_tokens": [spec.tokens for spec, _ in engine.specs],
                **spaces.about(engine.space),
            }
            for engine in daemon.engines.by_name.values()
        },
        "turns": {name: getattr(daemon.turns, name) for name in ("slowest", "long", "busy")},
        "config": [
            {"key": each.path, "value": each.value, "source": each.source}
            for each in daemon.effective.settings
        ],
    }
    return json.dumps(document, default=str).encode()
