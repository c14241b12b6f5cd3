"""Small storage managers for tests: values that are drawn from their keys, tiers on memory, faults on demand."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lmcache_core import frame
from lmcache_core.config import Config, ManagerConfig, TierConfig
from lmcache_core.memory.arena import Access, Arena
from lmcache_core.memory.backend import MemoryBackend, MemoryConfig
from lmcache_core.memory.pool import Pool
from lmcache_core.observers import Metrics, check_identities
from lmcache_core.policies.lru import LRU, LRUConfig
from lmcache_core.spi import (
    AbstractBackend,
    ByteSize,
    Context,
    Duration,
    Interior,
    Key,
    KVSpec,
    Lease,
    MemoryOptions,
    Refusal,
    Reservation,
    SegmentSpec,
    Wrapper,
)
from lmcache_core.storage.manager import StorageManager
from lmcache_core.storage.results import Reason
from lmcache_core.storage.tier import Tier
from lmcache_core.testing.contexts import simulated_context
from lmcache_core.testing.fakes import Slow
from lmcache_core.wrappers.around import Around, Call, Done

SPACE = hashlib.sha256(b"space").digest()
TOKENS = 256
TAGS = ("red", "blue")
PAGE = 4096


def key_of(number: int, space: bytes = SPACE, group: int = 0) -> Key:
    return Key(space, hashlib.sha256(b"chunk %d" % number).digest(), group)


def payload_of(key: Key, nbytes: int) -> bytes:
    """The only right payload of a key."""
    return hashlib.shake_128(key.digest).digest(nbytes)


def spec_of(nbytes: int, segments: int = 2) -> KVSpec:
    """An opaque payload in equal segments (the last one takes the rest)."""
    step = max(1, nbytes // segments)
    sizes = [step] * (segments - 1) + [nbytes - step * (segments - 1)]
    parts = tuple(SegmentSpec(layer, 0, 0, size) for layer, size in enumerate(sizes))
    return KVSpec("uint8", TOKENS, 1, 0, 0, Interior.PAGE, parts)


def frame_nbytes(nbytes: int, tags: Sequence[str] = ()) -> int:
    """Length of the frame around a payload of ``spec_of(nbytes)``."""
    return frame.header_nbytes(2, tags=tags) + nbytes


def fill(reservation: Reservation, tags: Sequence[str] = ()) -> bytes:
    """Write payload and header of the value a reservation is for; returns the identity."""
    view = reservation.view
    room = frame.header_nbytes(2, tags=tags)
    nbytes = view.nbytes - room
    view[room:] = payload_of(reservation.key, nbytes)
    spec = spec_of(nbytes)
    sealed = frame.seal_value(view[:room], view[room:], reservation.key, spec=spec, tags=tags)
    return sealed.identity


def plain_frame(key: Key, nbytes: int, tags: Sequence[str] = ()) -> bytes:
    """The whole frame of a value."""
    room = frame.header_nbytes(2, tags=tags)
    whole = memoryview(bytearray(room + nbytes))
    whole[room:] = payload_of(key, nbytes)
    frame.seal_value(whole[:room], whole[room:], key, spec=spec_of(nbytes), tags=tags)
    return bytes(whole)


def verify_lease(lease: Lease) -> None:
    """Assert that what is served is what was stored: every byte, header and payload."""
    header = frame.open_header(lease.view, lease.key)
    payload = lease.view[header.nbytes : header.nbytes + header.stored_nbytes]
    assert bytes(payload) == payload_of(lease.key, payload.nbytes), f"wrong bytes for {lease.key!r}"
    assert lease.identity == header.identity, f"identity of {lease.key!r} differs"


def put(
    manager: StorageManager,
    keys: Sequence[Key],
    nbytes: int = PAGE,
    *,
    owner: object = "writer",
    tags: Sequence[str] = (),
    tenant: str = "",
) -> list[bool]:
    """Store values through reservations, as an engine does; False for what was refused."""
    room = frame_nbytes(nbytes, tags)
    wants = [(key, room) for key in keys]
    grants = manager.reserve(wants, owner, tags=tags, tenant=tenant)
    held = [grant for grant in grants if not isinstance(grant, Refusal)]
    done = iter(manager.commit_batch(held, [fill(each, tags) for each in held]))
    return [False if isinstance(grant, Refusal) else next(done) for grant in grants]


class Late(Around):
    """A store that may hang: a load takes ``seconds`` and writes only then, cancelled or not (law B5 holds).

    Attributes:
        seconds: how long loads and stores take; a number, or a function that draws one.
        running: calls that have not ended.
        hung: calls that took more than no time.
    """

    def __init__(self, context: Context, inner: AbstractBackend, /, seconds: Any = 0.0) -> None:
        super().__init__(None, context, inner)
        self.seconds = seconds
        self.running = self.hung = 0

    async def open(self) -> None:
        await super().open()
        self.capabilities = replace(self.inner.capabilities, quiescence_s=1e6)

    async def around(
        self,
        verb: str,
        batch: Sequence[Any],
        call: Call,
        done: Done | None,
        deadline: float | None,
        /,
    ) -> Any:
        if verb not in ("load", "store"):
            return await call(batch, done)
        cancelled = await self._linger()
        for item in batch if verb == "load" else ():
            for view in item.into:  # whoever was given this memory meanwhile will notice
                view[:] = b"\xee" * view.nbytes
        results = await call(batch, None if verb == "load" else done)
        if cancelled:
            raise asyncio.CancelledError
        if verb == "load" and done is not None:
            for index, result in enumerate(results):
                done(index, result)
        return results

    async def _linger(self) -> bool:
        seconds = self.seconds() if callable(self.seconds) else self.seconds
        until = self.context.clock.now() + seconds
        cancelled = False
        self.running += 1
        self.hung += seconds > 0
        try:
            while (left := until - self.context.clock.now()) > 1e-9:
                try:
                    await self.context.clock.sleep(left)
                except asyncio.CancelledError:
                    cancelled = True
        finally:
            self.running -= 1
        return cancelled


class Lasting(Wrapper):
    """Keeps its values over a close; with ``shared`` it says that others see them too."""

    def __init__(
        self,
        context: Context,
        inner: AbstractBackend,
        /,
        *,
        shared: bool = False,
        persistent: bool = False,
    ) -> None:
        super().__init__(None, context, inner)
        self.capabilities = replace(inner.capabilities, shared=shared, persistent=persistent)

    async def open(self) -> None:
        """The values are there already."""

    async def aclose(self) -> None:
        """The values stay."""


def make_memory(context: Context, size: int = 1 << 30) -> MemoryBackend:
    return MemoryBackend(MemoryConfig(ByteSize(size)), context)


def make_tier(
    name: str = "disk",
    backend: AbstractBackend | None = None,
    *,
    size: int | None = 1 << 20,
    context: Context | None = None,
    seconds: float | None = None,
    **settings: Any,
) -> Tier:
    """A tier on memory; ``seconds`` of virtual time per call."""
    context = context or simulated_context(tier=name)
    if backend is None:
        backend = make_memory(context)
    if seconds is not None:
        backend = Slow(context, backend, seconds)
    config = TierConfig(
        plugin="memory", name=name, size=None if size is None else ByteSize(size), **settings
    )
    return Tier(config, backend, context=context, policy=lambda limit: LRU(LRUConfig(), limit))


def make_manager(
    tiers: Sequence[Tier] = (),
    *,
    capacity: int = 64 * PAGE,
    context: Context | None = None,
    config: Config | None = None,
    seed: int = 0,
    access: Access = Access.PRIVATE,
    **settings: Any,
) -> StorageManager:
    """A manager on a small pool; ``settings`` are those of ``ManagerConfig``."""
    context = context or simulated_context(tier="cpu", random=random.Random(seed))
    config = config or Config(manager=ManagerConfig(**settings))
    arena = Arena(capacity, MemoryOptions(populate=False), access=access, overcommit=True)
    managers: list[StorageManager] = []
    shares = config.manager
    pool = Pool(
        arena,
        LRU(LRUConfig(), capacity),
        dirty_share=shares.dirty_cap,
        clean_share=shares.clean_reserve,
        quarantine_share=shares.quarantine,
        now=context.clock.now,
        on_evict=lambda keys, nbytes: managers[0].evicted(keys, nbytes),
    )
    managers.append(StorageManager(pool, tiers, config=config, context=context, metrics=Metrics()))
    return managers[0]


def below(plugin: str, options: object, /, *, deadline: float = 2.0) -> Config:
    """Configuration of one tier of a plugin, always asked, whatever it costs."""
    tier = TierConfig(plugin=plugin, name=plugin, options=options, deadline=Duration(deadline))
    return Config(tiers=(tier,), manager=ManagerConfig(cost_gate=False))


async def served(manager: StorageManager, keys: Sequence[Key], /) -> tuple[int, Reason]:
    """Load and verify; how many leading values came, and why no more."""
    loaded = await manager.load(keys, "reader")
    for lease in loaded.leases:
        verify_lease(lease)
    manager.release(loaded.leases)
    return len(loaded.leases), loaded.reason


async def closed(*managers: StorageManager) -> None:
    """Hold the books, once the last call has ended, and close."""
    for manager in managers:
        for _ in range(2000):  # a call ends a moment after its last answer
            if not check_identities(manager.metrics.snapshot()):
                break
            await asyncio.sleep(0.001)
        manager.check()
        await manager.aclose()
