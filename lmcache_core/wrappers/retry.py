"""Tries again what the store says may succeed, within a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_core.spi import AbstractBackend, BackendError, Context, Duration, Event
from lmcache_core.wrappers.around import Around, Call, Done, Settled, failed


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryOptions:
    """Attributes:

    attempts: most tries of one call, the first included.
    pause: before the second try; doubles, jittered, and never outlasts the deadline.
    budget: most retries as a share of calls, so that a store in trouble is not asked twice as much.
    """

    attempts: int = 2
    pause: Duration = Duration(0.01)
    budget: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried(Event):
    """A call, or the failed part of its batch, is tried again."""

    verb: str
    reason: str


class Retry(Around):
    """Only errors with ``retryable`` are tried again; items that ended well are not."""

    config_type = RetryOptions
    BURST = 10.0
    """Retries that may come at once after a quiet time."""

    def __init__(self, config: RetryOptions, context: Context, inner: AbstractBackend, /) -> None:
        super().__init__(config, context, inner)
        self._credit = self.BURST

    async def around(
        self,
        verb: str,
        batch: Sequence[Any],
        call: Call,
        done: Done | None,
        deadline: float | None,
        /,
    ) -> Any:
        self._credit = min(self.BURST, self._credit + self.config.budget)
        single = verb in ("lookup", "delete")
        settled = Settled(0 if single else len(batch), done)
        left, bad = list(range(len(batch))), dict[int, BackendError]()
        attempt = 1
        while True:
            trying = left

            def early(at: int, result: Any, trying: list[int] = trying) -> None:
                if result.error is None:
                    settled(trying[at], result)

            try:
                ended = await call([batch[i] for i in trying], None if single else early)
            except BackendError as error:
                if await self._again(verb, attempt, error, deadline):
                    attempt += 1
                    continue
                if single or not bad:
                    raise  # no item has a result, in no attempt
                break
            if single:
                return ended
            bad = {}
            for index, result in zip(trying, ended, strict=True):
                if result.error is None:
                    settled(index, result)
                elif result.error.retryable:
                    bad[index] = result.error
                else:
                    settled(index, result)
            left = list(bad)
            if not bad or not await self._again(verb, attempt, next(iter(bad.values())), deadline):
                break
            attempt += 1
        for index, last in bad.items():
            settled(index, failed(verb, last))
        return settled.results

    async def _again(
        self, verb: str, attempt: int, error: BackendError, deadline: float | None
    ) -> bool:
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
