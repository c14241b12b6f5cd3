"""Tries again what the store says may succeed, within a budget."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lmcache_core.spi import (
    AbstractBackend,
    BackendError,
    Context,
    Duration,
    Event,
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

R = TypeVar("R", Loaded, Stored)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryOptions:
    """Attributes:

    attempts: most tries of one call, the first included.
    pause: before the second try; doubles, jittered, and never outlasts the deadline.
    budget: most retries as a share of calls, so that a store in trouble is not asked twice as much.
    """

    attempts: int = 2
    pause: Duration = Duration(0.01)  # a number
    budget: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried(Event):
    """A call, or the failed part of its batch, is tried again."""

    verb: str
    reason: str


class Retry(Wrapper):
    """Only errors with ``retryable`` are tried again; items that ended well are not."""

    config_type = RetryOptions
    BURST = 10.0
    """Retries that may come at once after a quiet time."""

    def __init__(self, config: RetryOptions, context: Context, inner: AbstractBackend, /) -> None:
        super().__init__(config, context, inner)
        self._credit = self.BURST

    async def lookup(
        self, keys: Sequence[Key], /, *, deadline: float | None = None
    ) -> Sequence[Found | None]:
        return await self._whole(
            "lookup", lambda: self.inner.lookup(keys, deadline=deadline), deadline
        )

    async def load(
        self,
        batch: Sequence[Load],
        /,
        *,
        done: LoadDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Loaded]:
        async def call(items: Sequence[Load], done: LoadDone) -> Sequence[Loaded]:
            return await self.inner.load(items, done=done, deadline=deadline)

        return await self._items("load", call, batch, done, deadline)

    async def store(
        self,
        batch: Sequence[Store],
        /,
        *,
        done: StoreDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Stored]:
        async def call(items: Sequence[Store], done: StoreDone) -> Sequence[Stored]:
            return await self.inner.store(items, done=done, deadline=deadline)

        return await self._items("store", call, batch, done, deadline)

    async def delete(self, keys: Sequence[Key], /) -> int:
        return await self._whole("delete", lambda: self.inner.delete(keys), None)

    async def _again(self, verb: str, attempt: int, error: Any, deadline: float | None) -> bool:
        """Pause before another try, or tell that there is none."""
        if attempt >= self.config.attempts or not error.retryable or self._credit < 1:
            return False
        pause = self.config.pause * 2 ** (attempt - 1) * self.context.random.uniform(0.5, 1.5)
        if deadline is not None and self.context.clock.now() + pause >= deadline:
            return False
        self._credit -= 1
        self.context.emit(Retried(tier=self.context.tier, verb=verb, reason=str(error)))
        await self.context.clock.sleep(pause)
        return True

    def _earn(self) -> None:
        self._credit = min(self.BURST, self._credit + self.config.budget)

    async def _whole(
        self, verb: str, call: Callable[[], Awaitable[T]], deadline: float | None
    ) -> T:
        self._earn()
        attempt = 1
        while True:
            try:
                return await call()
            except BackendError as error:
                if not await self._again(verb, attempt, error, deadline):
                    raise
            attempt += 1

    async def _items(
        self,
        verb: str,
        call: Callable[[Sequence[Any], Callable[[int, R], None]], Awaitable[Sequence[R]]],
        batch: Sequence[Any],
        done: Callable[[int, R], None] | None,
        deadline: float | None,
    ) -> list[R]:
        results: dict[int, R] = {}
        told: set[int] = set()

        def settle(index: int, result: R) -> None:
            results[index] = result
            if index not in told:
                told.add(index)
                if done is not None:
                    done(index, result)

        left: list[int] = list(range(len(batch)))
        attempt = 1
        self._earn()
        while True:
            trying: list[int] = left

            def early(position: int, result: R, trying: list[int] = trying) -> None:
                if result.error is None:
                    settle(trying[position], result)

            failure: BackendError | None = None
            try:
                ended = await call([batch[index] for index in trying], early)
            except BackendError as error:
                failure = error
                if len(results) < len(batch) and not await self._again(
                    verb, attempt, error, deadline
                ):
                    raise
                if len(results) == len(batch):
                    break
                attempt += 1
                continue
            for index, result in zip(trying, ended, strict=True):
                results[index] = result
                if result.error is None:
                    settle(index, result)
                elif result.error.retryable:
                    failure = failure or result.error
            if failure is None or not await self._again(verb, attempt, failure, deadline):
                break
            left = [i for i in trying if (e := results[i].error) is not None and e.retryable]
            attempt += 1
        for index in range(len(batch)):
            settle(index, results[index])
        return [results[index] for index in range(len(batch))]
