"""The public API: one cache, in this process or behind a daemon, for sync and async callers.

with Cache.from_config("cache.yaml") as cache:
    engine = cache.engine(Forms(space))          # one per model (key space)
    good = engine.load(tokens, surface)          # known prefix into engine memory
    engine.store(tokens, surface)                # and what is new back out
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Self, TypeVar

from lmcache_core.config import Config, Effective, Quality, load
from lmcache_core.engine.engine import CacheEngine
from lmcache_core.engine.forms import Forms
from lmcache_core.engine.quality import complaints
from lmcache_core.identity import KeyManager
from lmcache_core.observers import Emitter, Metrics
from lmcache_core.spi import ConfigError, Event, GPUConnector
from lmcache_core.storage.build import build, default_context, fidelity
from lmcache_core.storage.results import Flushed, Shutdown
from lmcache_core.storage.sync import SyncManager
from lmcache_core.threads import DaemonExecutor
from lmcache_core.wire.autostart import connect_private
from lmcache_core.wire.client import DaemonClient

T = TypeVar("T")
CALL_THREADS = 4
AHEAD = 64 << 20
"""Bytes touched beyond those in use: in the engine's own process all of them would keep a core from it."""


class Cache:
    """Tiers, opened, and engines on top of them.

    Args:
        effective: what ``lmcache_core.config.load`` returned.
        observe: takes every event; must not block.

    Raises:
        ConfigError, PluginError: the configuration cannot work; one line says what and where.
    """

    def __init__(
        self, effective: Effective, /, *, observe: Callable[[Event], None] = lambda event: None
    ) -> None:
        self.config: Config = effective.config
        self.registry = effective.registry
        self.metrics = Metrics()
        log = logging.getLogger("lmcache")
        log.setLevel(self.config.log_level.upper())
        for note in effective.notes:
            log.warning("%s", note)
        configured = [
            (choice.name, self.registry.load("observers", choice.name)(choice.options))
            for choice in self.config.observers
        ]
        self._events = Emitter(configured, self.metrics, log=log)

        def emit(event: Event, /) -> None:
            observe(event)
            self._events(event)

        self._observe = emit
        self._threads = DaemonExecutor("lmcache-calls", CALL_THREADS)
        self._said_chunk_size = any(
            setting.path == "chunk_size" and setting.source != "default"
            for setting in effective.settings
        )
        self.storage: SyncManager | DaemonClient
        if (daemon := _daemon(effective)) is not None:
            self.storage = daemon
        else:
            self.storage = SyncManager(
                lambda: build(
                    self.config,
                    self.registry,
                    metrics=self.metrics,
                    context=lambda name: default_context(name, emit),
                )
            )
            self.storage.manager.pool.touch_ahead(AHEAD)
        self._adopt()

    @classmethod
    def from_config(
        cls,
        source: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        /,
        *,
        observe: Callable[[Event], None] = lambda event: None,
        **settings: Any,
    ) -> Self:
        """Open the cache a configuration describes.

        Args:
            source: path of a YAML file, a mapping of the same shape, or None for ``LMCACHE_CONFIG_FILE``.
            settings: single keys, winning over ``source``: ``chunk_size=128``.
        """
        if isinstance(source, Mapping):
            return cls(load(flags={**source, **settings}), observe=observe)
        return cls(load(source, flags=settings), observe=observe)

    @property
    def fidelity(self) -> str:
        """``"exact"``, or ``approx:`` and the lossy serdes in any tier."""
        if isinstance(self.storage, DaemonClient):
            welcome = self.storage.welcome
            return welcome.fidelity if welcome is not None else "exact"
        return fidelity(self.config, self.registry)

    def admit(self, model: str, /) -> None:
        """Hold what was measured of the lossy serdes on a model (``quality.model_id``) against what is allowed.

        Raises:
            ConfigError: too little is known or too much is lost, and ``quality: refuse`` says so.
        """
        options = self.config.engine
        if options.quality is Quality.OFF:
            return
        for complaint in complaints(options, self.fidelity, model):
            if options.quality is Quality.REFUSE:
                raise ConfigError(f"quality: refuse: {complaint}")
            logging.getLogger("lmcache").warning("%s", complaint)

    def managers(self) -> dict[str, KeyManager]:
        """New key managers by name, as configured."""
        return {
            choice.name: self.registry.load("key_managers", choice.name)(choice.options)
            for choice in self.config.engine.key_managers
        }

    def engine(self, forms: Forms, /) -> CacheEngine:
        """Requests of one model against this cache."""
        return CacheEngine(
            self.storage,
            forms,
            self.config.engine,
            managers=self.managers(),
            emit=self._observe,
            metrics=self.metrics,
        )

    def connector(self, device: str, /) -> GPUConnector:
        """A new connector for engine memory on a kind of device (``"cpu"``, ``"cuda"``)."""
        connector: GPUConnector = self.registry.load("gpu_connectors", device)()
        return connector

    async def call(self, function: Callable[..., T], /, *args: Any) -> T:
        """Run any method of this cache or its engines without blocking the running loop."""
        future: Future[T] = self._threads.submit(function, *args)
        return await asyncio.wrap_future(future)

    def invalidate(self, tag: str, /, *, seconds: float | None = None) -> int:
        """Delete everything stored under a tag, in every tier; counts the copies there were."""
        return self.storage.invalidate(tag, deadline=_deadline(seconds))

    def flush(self, *, seconds: float | None = None) -> Flushed:
        """Write what is only in memory to the tiers that want it; tells what is left."""
        return self.storage.flush(deadline=_deadline(seconds))

    def close(self, *, seconds: float | None = None) -> Shutdown:
        """Flush and close the tiers, or part from the daemon; idempotent, and in time whatever they do."""
        shutdown = self.storage.close(deadline=_deadline(seconds))
        self._events.close()
        return shutdown

    def usage(self) -> Sequence[tuple[str, int, int]]:
        """(tier, bytes, chunks) in lookup order."""
        if isinstance(self.storage, DaemonClient):
            return self.storage.usage()
        manager = self.storage.manager
        manager.measure()
        snapshot = self.metrics.snapshot()
        return [
            (manager.context.tier, *manager.pool.usage()),
            *(
                (
                    tier.name,
                    int(snapshot.total("lmcache_tier_resident_bytes", tier=tier.name)),
                    int(snapshot.total("lmcache_tier_chunks", tier=tier.name)),
                )
                for tier in manager.tiers
            ),
        ]

    def _adopt(self) -> None:
        """Chunk as the daemon does, unless this configuration says otherwise."""
        if not isinstance(self.storage, DaemonClient) or self.storage.welcome is None:
            return
        theirs, engine = self.storage.welcome.chunk_size, self.config.engine
        if theirs == engine.chunk_size:
            return
        if self._said_chunk_size:
            log = logging.getLogger("lmcache")
            text = (
                "chunks of %d tokens here, of %d in the daemon: nothing is shared with its others"
            )
            log.warning(text, engine.chunk_size, theirs)
        else:
            self.config = replace(self.config, engine=replace(engine, chunk_size=theirs))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _daemon(effective: Effective) -> DaemonClient | None:
    """The client of the daemon that a configuration names; None when the cache is in this process."""
    config = effective.config.daemon
    if config.private:
        return connect_private(effective)
    if not config.address:
        return None
    return DaemonClient(
        config.address,
        token=config.token.reveal(),
        timeout=config.timeout,
        transfer=config.transfer.value,
    )


def _deadline(seconds: float | None) -> float | None:
    return None if seconds is None else time.monotonic() + seconds
