"""One method for all four verbs, for wrappers that treat them alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from lmcache_core.spi import (
    BackendError,
    Found,
    Key,
    Load,
    LoadDone,
    Loaded,
    Store,
    Stored,
    StoreDone,
    Wrapper,
)

Done = Callable[[int, Any], None]
Call = Callable[[Sequence[Any], Done | None], Awaitable[Any]]
"""A verb of the inner backend, given items and ``done``."""


class Around(Wrapper):
    """Subclasses override ``around`` and call ``call`` for whatever part of the batch they like."""

    async def around(
        self,
        verb: str,
        batch: Sequence[Any],
        call: Call,
        done: Done | None,
        deadline: float | None,
        /,
    ) -> Any:
        return await call(batch, done)

    async def lookup(
        self, keys: Sequence[Key], /, *, deadline: float | None = None
    ) -> Sequence[Found | None]:
        def call(keys: Sequence[Key], _: Done | None) -> Awaitable[Any]:
            return self.inner.lookup(keys, deadline=deadline)

        found: Sequence[Found | None] = await self.around("lookup", keys, call, None, deadline)
        return found

    async def load(
        self,
        batch: Sequence[Load],
        /,
        *,
        done: LoadDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Loaded]:
        def call(batch: Sequence[Load], done: Done | None) -> Awaitable[Any]:
            return self.inner.load(batch, done=done, deadline=deadline)

        results: Sequence[Loaded] = await self.around("load", batch, call, done, deadline)
        return results

    async def store(
        self,
        batch: Sequence[Store],
        /,
        *,
        done: StoreDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Stored]:
        def call(batch: Sequence[Store], done: Done | None) -> Awaitable[Any]:
            return self.inner.store(batch, done=done, deadline=deadline)

        results: Sequence[Stored] = await self.around("store", batch, call, done, deadline)
        return results

    async def delete(self, keys: Sequence[Key], /) -> int:
        def call(keys: Sequence[Key], _: Done | None) -> Awaitable[Any]:
            return self.inner.delete(keys)

        return int(await self.around("delete", keys, call, None, None))


def failed(verb: str, error: BackendError, /) -> Any:
    """What an item of ``verb`` (load or store) that failed alone results in."""
    return Loaded.failed(error) if verb == "load" else Stored.failed(error)


class Settled:
    """Results of one batch as they come in; tells ``done`` once per item (law B16)."""

    def __init__(self, count: int, done: Done | None, /) -> None:
        self.results: list[Any] = [None] * count
        self._done = done

    def __call__(self, index: int, result: Any, /) -> None:
        if self.results[index] is None:
            self.results[index] = result
            if self._done is not None:
                self._done(index, result)
