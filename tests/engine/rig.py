"""An engine without a model: rows of KV drawn from the tokens they stand for, and small caches to keep them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lmcache_core import ops
from lmcache_core.config import Config, EngineConfig, ManagerConfig, VerifyHot
from lmcache_core.engine import CacheEngine, Forms
from lmcache_core.identity import FORMAT, Group, KeySpace
from lmcache_core.spi import Interior, Key, Reuse
from lmcache_core.storage.build import default_context
from lmcache_core.storage.sync import SyncManager
from lmcache_core.storage.tier import Tier
from lmcache_core.testing.worlds import make_manager, make_memory, make_tier

CHUNK = 4
HEAD_DIM = 4
ROW = HEAD_DIM * 4
FRAME = 8192
"""Bytes of memory one value takes: header and a padded payload."""


def group(
    reuse: Reuse = Reuse.ALL, *, window: int = 0, layers: tuple[int, ...] = (0, 1), planes: int = 2
) -> Group:
    return Group(
        reuse=reuse, window=window, tokens_per_chunk=CHUNK, layers=layers, heads=1, head_range=(0, 1),
        head_dim=HEAD_DIM, planes=planes, dtype="float32", interior=Interior.ROWS, page_size=None,
        encoding=None, engine=None,
    )  # fmt: skip


ALL = (group(),)
TWO = (group(), group(layers=(2,), planes=1))
WINDOW = (group(), group(Reuse.WINDOW, window=6, layers=(2, 3)))
POINT = (group(), group(Reuse.POINT, layers=(2,), planes=1))


def space(groups: Sequence[Group] = ALL, **fields: Any) -> KeySpace:
    given: dict[str, Any] = {
        "format": FORMAT, "model": "none", "weights": bytes(32), "epoch": 0, "kv_dtype": "float32",
        "scales": "none", "rope": (), "groups": tuple(groups), "adapter": None, "tenant": "",
        "fidelity": "exact", "tags_in_key": (), "fields": (),
    }  # fmt: skip
    return KeySpace(**given | fields)


def row(tokens: Sequence[int], position: int, layer: int, plane: int) -> bytes:
    """The only right KV of a position: it depends on every token up to it."""
    text = repr((tuple(tokens[: position + 1]), layer, plane))
    return hashlib.shake_128(text.encode()).digest(ROW)


class Memory:
    """Engine memory of one request (a ``Surface``): (layer, plane) to rows by position.

    Attributes:
        gone: for a group, positions before this one are no longer there.
    """

    def __init__(self, groups: Sequence[Group], room: int) -> None:
        self.groups = groups
        self.gone: dict[int, int] = {}
        self.rows: dict[tuple[int, int], list[bytes]] = {
            (layer, plane): [b"\xaa" * ROW] * room
            for each in groups
            for layer in each.layers
            for plane in range(each.planes)
        }

    def compute(self, tokens: Sequence[int], first: int, end: int) -> None:
        for (layer, plane), rows in self.rows.items():
            for position in range(first, end):
                rows[position] = row(tokens, position, layer, plane)

    def pack(
        self, group: int, first: int, count: int, into: memoryview, seed: int, /
    ) -> Sequence[bytes]:
        if first < self.gone.get(group, 0):
            raise ValueError(f"token {first} has left the window")
        digests, at = [], 0
        for layer in self.groups[group].layers:
            begin = at
            for plane in range(self.groups[group].planes):
                for each in self.rows[layer, plane][first : first + count]:
                    into[at : at + ROW] = each
                    at += ROW
            digests.append(ops.digest(into[begin:at], seed))
        assert at == into.nbytes
        return digests

    def unpack(
        self, group: int, first: int, count: int, source: memoryview, seed: int,
        digests: Sequence[bytes], /,
    ) -> bool:  # fmt: skip
        room = len(next(iter(self.rows.values())))
        if first + count > room:
            raise ValueError(f"{first + count} tokens in room for {room}")
        at, good = 0, True
        for index, layer in enumerate(self.groups[group].layers):
            begin = at
            for plane in range(self.groups[group].planes):
                for position in range(first, first + count):
                    self.rows[layer, plane][position] = bytes(source[at : at + ROW])
                    at += ROW
            good &= not digests or ops.digest(source[begin:at], seed) == digests[index]
        assert at == source.nbytes
        return good

    def wrong(self, tokens: Sequence[int], good: int) -> list[tuple[int, int, int]]:
        """(layer, plane, position) of every row that a prefix of ``good`` tokens needs and that is not right."""
        found = []
        for each in self.groups:
            begin = {
                Reuse.ALL: 0,
                Reuse.WINDOW: max(0, good - each.window),
                Reuse.POINT: max(0, good - 1),
            }[each.reuse]
            for layer in each.layers:
                for plane in range(each.planes):
                    rows = self.rows[layer, plane]
                    found += [
                        (layer, plane, position)
                        for position in range(begin, good)
                        if rows[position] != row(tokens, position, layer, plane)
                    ]
        return found


class World:
    """An engine over a real storage manager: ``frames`` values fit in memory, any number in the lower tier."""

    def __init__(
        self,
        groups: Sequence[Group] = ALL,
        *,
        frames: int = 64,
        lower: bool = False,
        tier: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.config = Config(
            engine=EngineConfig(chunk_size=CHUNK, **{"verify_hot": VerifyHot.ALWAYS, **options}),
            manager=ManagerConfig(cost_gate=False),
        )
        self.groups = tuple(groups)
        self.disk: Any = None
        self.sync = SyncManager(lambda: self._open(frames, lower, tier or {}))
        self.manager = self.sync.manager
        self.metrics = self.manager.metrics

    async def _open(self, frames: int, lower: bool, settings: dict[str, Any]) -> Any:
        tiers: list[Tier] = []
        if lower:
            context = default_context("disk")
            self.disk = make_memory(context)
            tiers = [make_tier(backend=self.disk, size=1 << 30, context=context, **settings)]
        manager = make_manager(
            tiers, capacity=frames * FRAME, context=default_context("cpu"), config=self.config
        )
        await manager.open()
        return manager

    def engine(self, **fields: Any) -> CacheEngine:
        return CacheEngine(
            self.sync, Forms(space(self.groups, **fields)), self.config.engine, metrics=self.metrics
        )

    def memory(self, room: int) -> Memory:
        return Memory(self.groups, room)

    def fill(self, engine: CacheEngine, tokens: Sequence[int], **how: Any) -> Any:
        """Compute a prompt and store it."""
        memory = self.memory(len(tokens))
        memory.compute(tokens, 0, len(tokens))
        request = engine.request("fill", tokens, **how)
        try:
            return request.store(memory, len(tokens))
        finally:
            request.end()

    def reuse(self, engine: CacheEngine, tokens: Sequence[int], **how: Any) -> int:
        """Look a prompt up, load it, and check every byte; returns how far it reached."""
        request = engine.request("reuse", tokens, **how)
        try:
            request.lookup()
            memory = self.memory(max(len(tokens), request.room))
            good = request.load(memory)
            assert memory.wrong(tokens, good) == []
            return good
        finally:
            request.end()

    def damage(self, key: Key, rng: random.Random) -> bool:
        """Flip one payload bit of a resident value, as a stray pointer would."""
        (loan,) = leases = self.manager.lease([key], "damage")
        if loan is not None:
            extent = loan.extent
            view = self.manager.pool.arena.view(extent.segment, extent.base, extent.nbytes)
            view[rng.randrange(4096, extent.nbytes)] ^= 1 << rng.randrange(8)
        self.manager.release(leases)
        return loan is not None

    def resident(self) -> list[Key]:
        return [key for key, _ in self.manager.pool.scan(0, 1000)[0]]

    def idle(self) -> None:
        """Assert that nothing is held and every invariant holds."""
        stock = self.manager.pool.accounting()
        assert (stock.leased, stock.reserved) == (0, 0)
        self.sync.flush()
        self.manager.check()


@contextmanager
def world(*args: Any, **settings: Any) -> Iterator[World]:
    made = World(*args, **settings)
    try:
        yield made
        made.idle()
    finally:
        made.sync.close()
