"""Bounds what one call and one moment ask of a backend."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from lmcache_core.spi import AbstractBackend, BackendError, Context, Stored
from lmcache_core.wrappers.around import Around, Call, Done, Settled, failed


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


class Limit(Around):
    """Cuts batches, refuses long values, queues calls. Callers may send batches of any length."""

    config_type = LimitOptions

    def __init__(self, config: LimitOptions, context: Context, inner: AbstractBackend, /) -> None:
        super().__init__(config, context, inner)
        self._places = asyncio.Semaphore(config.concurrency) if config.concurrency else None

    async def open(self) -> None:
        await super().open()
        own = self.capabilities
        self._batch = _least(self.config.max_batch, own.max_batch)
        self.capabilities = replace(
            own, max_batch=None, max_value=_least(self.config.max_value, own.max_value)
        )

    async def around(
        self,
        verb: str,
        batch: Sequence[Any],
        call: Call,
        done: Done | None,
        deadline: float | None,
        /,
    ) -> Any:
        step = self._batch or max(1, len(batch))
        if verb in ("lookup", "delete"):
            answers = []
            for start in range(0, len(batch), step):
                async with self._places or AsyncExitStack():
                    answers.append(await call(batch[start : start + step], None))
            return sum(answers) if verb == "delete" else [each for a in answers for each in a]
        settled = Settled(len(batch), done)
        longest = self.capabilities.max_value
        if verb == "store" and longest is not None:
            for index, item in enumerate(batch):
                if item.nbytes > longest:
                    settled(index, Stored.refused(f"too large: {item.nbytes} bytes, {longest} fit"))
        wanted = [index for index, result in enumerate(settled.results) if result is None]

        async def run(indices: Sequence[int]) -> None:
            async with self._places or AsyncExitStack():
                try:
                    items = [batch[i] for i in indices]
                    ended = await call(items, lambda i, result: settled(indices[i], result))
                except BackendError as error:
                    if len(indices) == len(batch):
                        raise
                    ended = [failed(verb, error)] * len(indices)
            for index, result in zip(indices, ended, strict=True):
                settled(index, result)

        pieces = [wanted[start : start + step] for start in range(0, len(wanted), step)]
        if len(pieces) == 1:
            await run(pieces[0])
        elif pieces:
            # Ends when all have ended, cancelled or not (law B5); a piece that fails fails alone.
            for error in await asyncio.gather(*map(run, pieces), return_exceptions=True):
                if error is not None:
                    raise error
        return settled.results


def _least(*bounds: int | None) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)
