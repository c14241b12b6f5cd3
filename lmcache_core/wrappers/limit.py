"""Bounds what one call and one moment ask of a backend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from lmcache_core.spi import (
    AbstractBackend,
    BackendError,
    Context,
    Key,
    Load,
    LoadDone,
    Loaded,
    Store,
    Stored,
    StoreDone,
    Wrapper,
)

I = TypeVar("I")  # noqa: E741  # item and result of one verb
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """Attributes:

    max_batch: most items per call to the backend; its own ``max_batch`` counts too.
    max_value: longer values are refused.
    concurrency: most calls at once; further ones wait.
    """

    max_batch: int | None = None
    max_value: int | None = None
    concurrency: int | None = None


class Limit(Wrapper):
    """Cuts batches, refuses long values, queues calls. Callers may send batches of any length."""

    config_type = LimitOptions

    def __init__(self, config: LimitOptions, context: Context, inner: AbstractBackend, /) -> None:
        super().__init__(config, context, inner)
        self._places = asyncio.Semaphore(config.concurrency) if config.concurrency else None

    async def open(self) -> None:
        await super().open()
        own = self.capabilities
        self._batch = _least(self.config.max_batch, own.max_batch)
        self._value = _least(self.config.max_value, own.max_value)
        self.capabilities = replace(own, max_batch=None, max_value=self._value)

    async def lookup(
        self, keys: Sequence[Key], /, *, deadline: float | None = None
    ) -> Sequence[Any]:
        step = self._batch or max(1, len(keys))
        pieces = [keys[i : i + step] for i in range(0, len(keys), step)]
        found: list[Any] = []
        for piece in pieces:
            async with self._place():
                found += await self.inner.lookup(piece, deadline=deadline)
        return found

    async def load(
        self,
        batch: Sequence[Load],
        /,
        *,
        done: LoadDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Loaded]:
        async def call(piece: Sequence[Load], done: LoadDone) -> Sequence[Loaded]:
            return await self.inner.load(piece, done=done, deadline=deadline)

        return await self._cut(batch, range(len(batch)), {}, call, Loaded.failed, done)

    async def store(
        self,
        batch: Sequence[Store],
        /,
        *,
        done: StoreDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Stored]:
        async def call(piece: Sequence[Store], done: StoreDone) -> Sequence[Stored]:
            return await self.inner.store(piece, done=done, deadline=deadline)

        known: dict[int, Stored] = {}
        if self._value is not None:
            for index, item in enumerate(batch):
                if item.nbytes > self._value:
                    known[index] = Stored.refused("too large")
        rest = [index for index in range(len(batch)) if index not in known]
        return await self._cut(batch, rest, known, call, Stored.failed, done)

    async def delete(self, keys: Sequence[Key], /) -> int:
        step = self._batch or max(1, len(keys))
        count = 0
        for start in range(0, len(keys), step):
            async with self._place():
                count += await self.inner.delete(keys[start : start + step])
        return count

    def _place(self) -> Any:
        return self._places or AsyncExitStack()

    async def _cut(
        self,
        batch: Sequence[I],
        wanted: Sequence[int],
        results: dict[int, R],
        call: Callable[[Sequence[I], Callable[[int, R], None]], Any],
        failed: Callable[[BackendError], R],
        done: Callable[[int, R], None] | None,
    ) -> list[R]:
        """Run ``call`` on pieces at once; a piece that raises fails alone. Ends when all have ended (B5)."""
        for index, result in results.items():
            if done is not None:
                done(index, result)

        def finish(index: int, result: R) -> None:
            if index not in results:
                results[index] = result
                if done is not None:
                    done(index, result)

        async def run(indices: Sequence[int]) -> None:
            async with self._place():
                try:
                    ended = await call(
                        [batch[i] for i in indices], lambda i, result: finish(indices[i], result)
                    )
                except BackendError as error:
                    if len(indices) == len(batch):
                        raise
                    ended = [failed(error)] * len(indices)
            for index, result in zip(indices, ended, strict=True):
                finish(index, result)

        step = self._batch or max(1, len(wanted))
        pieces = [wanted[i : i + step] for i in range(0, len(wanted), step)]
        if len(pieces) == 1:
            await run(pieces[0])
        elif pieces:
            for error in await asyncio.gather(*map(run, pieces), return_exceptions=True):
                if error is not None:
                    raise error
        return [results[index] for index in range(len(batch))]


def _least(*bounds: int | None) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)
