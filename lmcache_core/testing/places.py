"""What histories of a storage manager are drawn on: stores with faults, tiers and managers of random settings."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from lmcache_core.config import Config, EngineConfig, ManagerConfig, Share, TierConfig, WritePolicy
from lmcache_core.memory.arena import Access
from lmcache_core.observers import Metrics
from lmcache_core.policies.lru import LRU, LRUConfig
from lmcache_core.spi import AbstractBackend, ByteSize, Context, Duration, Event, Evicted, Key
from lmcache_core.storage.feed import Feed
from lmcache_core.storage.manager import StorageManager
from lmcache_core.storage.tier import Tier
from lmcache_core.testing.contexts import simulated_context
from lmcache_core.testing.worlds import PAGE, Lasting, Late, make_manager, make_memory
from lmcache_core.wrappers import (
    Breaker,
    BreakerOptions,
    Chaos,
    ChaosOptions,
    Check,
    CheckOptions,
    Measured,
    Retry,
    RetryOptions,
)


@dataclass
class Place:
    """What stands below one tier, and outlives managers.

    Attributes:
        make: the backend of a new tier on it.
        used: bytes really there now.
        calm: makes the tier behave from now on.
        hit: faults that met something, by kind.
        keys: of the values that are really there now.
    """

    make: Callable[[], AbstractBackend]
    used: Callable[[], int]
    calm: Callable[[], None]
    hit: Callable[[], Counter[str]]
    keys: Callable[[], Collection[Key]]


Factory = Callable[[Context, random.Random, bool], Place]
"""Makes a place, given the tier's context, the history's randomness, and whether it is shared."""


def memory_place(context: Context, source: random.Random, shared: bool) -> Place:
    """A dictionary behind chaos and hangs."""
    memory = make_memory(context)
    options = ChaosOptions(
        delay=source.choice((0.0, 0.3)), delay_s=source.choice((0.01, 0.5)),
        fail=source.choice((0.0, 0.1, 0.3)), fail_item=source.choice((0.0, 0.2)),
        flip=source.choice((0.0, 0.1)), tear=source.choice((0.0, 0.1)),
        rot=source.choice((0.0, 0.1)), lose=0.0 if not shared else source.choice((0.0, 0.1)),
    )  # fmt: skip
    kept = Lasting(context, memory, shared=shared, persistent=True)
    chaos = Chaos(options, context, kept)
    hang = source.choice((0.0, 0.05, 0.2))

    def seconds() -> float:
        return source.uniform(1, 60) if late.hangs and source.random() < hang else 0.0

    late = _Hanging(context, chaos, seconds)

    def calm() -> None:
        chaos.active = late.hangs = False

    return Place(
        lambda: late, lambda: memory._nbytes, calm,
        lambda: chaos.hit + Counter(hang=late.hung), lambda: memory._values,
    )  # fmt: skip


class _Hanging(Late):
    hangs = True


FACTORIES: dict[str, Factory] = {"memory": memory_place}
"""Kinds of places a history may draw; other kinds (a simulated disk) are added by name."""


class World:
    """Places that outlive managers, and the managers drawn on them."""

    def __init__(self, source: random.Random, kinds: Sequence[str]) -> None:
        self.source = source
        self.kinds = kinds
        self.places: dict[str, Place] = {}
        self.shared: dict[str, bool] = {}
        self.metrics = Metrics()
        self.evicted: Counter[str] = Counter()
        self.feed = Feed(0)

    def context(self, name: str) -> Context:
        source = random.Random(self.source.getrandbits(64))
        return simulated_context(tier=name, random=source, emit=self.observe)

    def observe(self, event: Event, /) -> None:
        """Add up what events say."""
        if isinstance(event, Evicted):
            self.evicted[event.tier] += event.count

    def make_tier(self, name: str) -> Tier:
        source, context = self.source, self.context(name)
        if name not in self.places:
            self.shared[name] = source.random() < 0.4
            factory = FACTORIES[source.choice(self.kinds)]
            self.places[name] = factory(context, source, self.shared[name])
        shared = self.shared[name]
        backend: AbstractBackend = Check(CheckOptions(), context, self.places[name].make())
        if source.random() < 0.5:
            backend = Retry(RetryOptions(), context, backend)
        if source.random() < 0.5:
            options = BreakerOptions(open_after=3, pause=Duration(0.5), longest_pause=Duration(4.0))
            backend = Breaker(options, context, backend)
        backend = Measured(self.metrics, context, backend)
        config = TierConfig(
            plugin="memory",
            name=name,
            size=None if shared else ByteSize(source.choice((6, 12, 40)) * 3 * PAGE),
            write=source.choice(list(WritePolicy)),
            after_touches=source.choice((1, 1, 2)),
            promote=source.random() < 0.8,
            ttl=source.choice((None, None, Duration(20.0))),
            deadline=Duration(source.choice((0.2, 1.0))),
        )
        return Tier(config, backend, context=context, policy=lambda limit: LRU(LRUConfig(), limit))

    def make_manager(self, names: Sequence[str], access: Access = Access.PRIVATE) -> StorageManager:
        source = self.source
        self.evicted.clear()
        config = Config(
            engine=EngineConfig(),
            manager=ManagerConfig(
                clean_reserve=Share(source.choice((0.05, 0.3))),
                dirty_cap=Share(source.choice((0.25, 0.6))),
                quarantine=Share(source.choice((0.1, 0.4))),
                cost_gate=source.random() < 0.3,
                close_timeout=Duration(30.0),
            ),
        )
        manager = make_manager(
            [], capacity=source.choice((8, 16, 64)) * 3 * PAGE, context=self.context("cpu"),
            config=config, access=access,
        )  # fmt: skip
        self.metrics = manager.metrics
        self.feed = manager.feed = Feed(1 << 20)
        manager.pool.index.watch = self.feed.watch(manager.context.tier)
        manager._given += [self.make_tier(name) for name in names]
        return manager
