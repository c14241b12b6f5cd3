"""Encodes values on their way out and decodes them on their way in; the frame says how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from lmcache_core import frame
from lmcache_core.spi import (
    MISSED,
    AbstractBackend,
    Context,
    Corrupt,
    Key,
    Load,
    LoadDone,
    Loaded,
    LoadStatus,
    Recoded,
    Store,
    Stored,
    StoreDone,
    Wrapper,
)
from lmcache_core.wrappers.coder import Chain, Coded, Coder, plain_nbytes
from lmcache_core.wrappers.heads import read_headers
from lmcache_core.wrappers.offload import Offload


class Encoded(Wrapper):
    """Values outside are plain frames, inside encoded ones (see ``Coder``); their header names the chain.

    Attributes:
        stored: stored lengths of values stored lately, until the tier takes them.
    """

    config_type = Chain
    config: Chain

    def __init__(self, config: Chain, context: Context, inner: AbstractBackend, /) -> None:
        super().__init__(config, context, inner)
        self.stored: dict[Key, int] = {}
        self.coder = Coder(config, context)

    async def open(self) -> None:
        await super().open()
        self.capabilities = replace(
            self.inner.capabilities, ranges=False, alignment=1, iov_max=1024, register=False
        )
        await self.coder.test()

    def bound(self, view: memoryview, key: Key, /) -> int:
        """Most bytes that a plain frame can become in the store."""
        return self.coder.bound(view, key)

    async def load(
        self,
        batch: Sequence[Load],
        /,
        *,
        done: LoadDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Loaded]:
        results: dict[int, Loaded] = {}
        decoded: list[Coded] = []

        def finish(at: int, result: Loaded) -> None:
            results[at] = result
            if done is not None:
                done(at, result)

        refused = [self.screen_load(load) for load in batch]
        found = await self.inner.lookup([load.key for load in batch], deadline=deadline)
        there = [at for at, each in enumerate(found) if each is not None and not refused[at]]
        buffers = [self.coder.spare.take(found[at].nbytes) for at in there]  # type: ignore[union-attr]
        rooms = [
            memoryview(buffer)[: found[at].nbytes]  # type: ignore[union-attr]
            for at, buffer in zip(there, buffers, strict=True)
        ]
        async with Offload(self.context) as offload:

            def succeeded(at: int, coded: Coded) -> None:
                decoded.append(coded)
                finish(at, Loaded.filled(coded.nbytes))

            def arrived(position: int, result: Loaded) -> None:
                at = there[position]
                if result.status is not LoadStatus.FILLED:
                    finish(at, result)
                    return
                offload.begin(
                    result.nbytes,
                    lambda: self.coder.decode(batch[at], rooms[position][: result.nbytes]),
                    partial(succeeded, at),
                    lambda error: finish(at, Loaded.failed(error)),
                )

            for at in range(len(batch)):
                if at not in there:
                    finish(at, refused[at] or MISSED)
            if there:
                loads = [
                    Load(batch[at].key, (room,)) for at, room in zip(there, rooms, strict=True)
                ]
                await self.inner.load(loads, done=arrived, deadline=deadline)
        self._tell("load", decoded)
        self.coder.spare.give(*buffers)
        return [results[at] for at in range(len(batch))]

    async def store(
        self,
        batch: Sequence[Store],
        /,
        *,
        done: StoreDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Stored]:
        results: dict[int, Stored] = {}
        encoded: dict[int, Coded] = {}

        def finish(at: int, result: Stored) -> None:
            results[at] = result
            if done is not None:
                done(at, result)

        async with Offload(self.context) as offload:
            for at, item in enumerate(batch):
                offload.begin(
                    item.nbytes,
                    partial(self.encode, item),
                    partial(encoded.__setitem__, at),
                    lambda error, at=at: finish(at, Stored.failed(error)),  # type: ignore[misc]
                )
        order = sorted(encoded)
        if order:
            self.stored.update((batch[at].key, encoded[at].view.nbytes) for at in order)
            await self.inner.store(
                [Store(batch[at].key, (encoded[at].view,), batch[at].ttl) for at in order],
                done=lambda position, result: finish(order[position], result),
                deadline=deadline,
            )
        self._tell("store", [*encoded.values()])
        self.coder.spare.give(*(each.buffer for each in encoded.values()))
        return [results[at] for at in range(len(batch))]

    async def headers(
        self, keys: Sequence[Key], deadline: float | None, /
    ) -> list[frame.Header | Loaded]:
        """The header of each value as it is stored, or why there is none; read alone where the store can."""
        if self.inner.capabilities.ranges:
            return await read_headers(self.inner, [(key, 0) for key in keys], deadline)
        stored = await self.inner.lookup(keys, deadline=deadline)
        there = [at for at, each in enumerate(stored) if each is not None]
        loads = [Load(keys[at], (memoryview(bytearray(stored[at].nbytes)),)) for at in there]  # type: ignore[union-attr]
        found: list[frame.Header | Loaded] = [MISSED] * len(keys)
        results = await self.inner.load(loads, deadline=deadline)
        for at, load, result in zip(there, loads, results, strict=True):
            found[at] = result
            if result.status is LoadStatus.FILLED:
                try:
                    found[at] = frame.open_header(load.into[0], load.key)
                except Corrupt as error:
                    found[at] = Loaded.failed(error)
        return found

    async def frame_lengths(self, keys: Sequence[Key], deadline: float | None) -> list[int | None]:
        """Length of each frame as it will be when decoded; None where whoever loads it will say why."""
        found = await self.headers(keys, deadline)
        return [None if isinstance(each, Loaded) else plain_nbytes(each) for each in found]

    def encode(self, item: Store) -> Coded:
        """The frame as it is stored; on a thread."""
        return self.coder.encode(item)

    def _tell(self, verb: str, coded: Sequence[Coded]) -> None:
        """One event for what was recoded in a batch, per chain."""
        for chain in sorted({each.chain for each in coded if each.raw}):
            done = [each for each in coded if each.raw and each.chain == chain]
            self.context.emit(
                Recoded(
                    tier=self.context.tier, verb=verb, values=len(done), chain=chain,
                    raw=sum(each.raw for each in done),
                    stored=sum(each.view.nbytes for each in done),
                    seconds=sum(each.seconds for each in done),
                )
            )  # fmt: skip
