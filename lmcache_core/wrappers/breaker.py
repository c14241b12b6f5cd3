"""Stops asking a store that does not answer, and finds out gently when it is back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from lmcache_core.spi import (
    AbstractBackend,
    BackendError,
    BufferTooSmall,
    Context,
    Corrupt,
    Duration,
    Found,
    HealthChanged,
    Key,
    Load,
    LoadDone,
    Loaded,
    Store,
    Stored,
    StoreDone,
    Unavailable,
    Unsupported,
    Wrapper,
)

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerOptions:
    """Attributes:

    open_after: failures in a row that open it.
    pause: first rest; doubles with each failed probe.
    longest_pause: bound of the rest.
    """

    open_after: int = 5
    pause: Duration = Duration(1.0)  # a number
    longest_pause: Duration = Duration(60.0)  # a number


class State(Enum):
    """Where a breaker is."""

    CLOSED = "closed"
    HALF_OPEN = "half open"
    OPEN = "open"


class Breaker(Wrapper):
    """While open every verb raises ``Unavailable`` at once; after a rest one call may try.

    Rests are drawn from [0.5, 1) of their length, so that many clients of one dead store do not return
    together. A failure is an error of a whole call, of all its items, or a call still running at its
    deadline; damage is a fault of a value, not of the store. Changes are told as ``HealthChanged``.
    """

    config_type = BreakerOptions

    def __init__(self, config: BreakerOptions, context: Context, inner: AbstractBackend, /) -> None:
        super().__init__(config, context, inner)
        self.state = State.CLOSED
        self._failures = 0
        self._rests = 0
        self._until = 0.0

    @property
    def resting(self) -> bool:
        """Whether calls are refused, all but a probe."""
        return self.state is not State.CLOSED

    async def lookup(
        self, keys: Sequence[Key], /, *, deadline: float | None = None
    ) -> Sequence[Found | None]:
        return await self._guard(lambda: self.inner.lookup(keys, deadline=deadline), deadline)

    async def load(
        self,
        batch: Sequence[Load],
        /,
        *,
        done: LoadDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Loaded]:
        return await self._guard(
            lambda: self.inner.load(batch, done=done, deadline=deadline), deadline
        )

    async def store(
        self,
        batch: Sequence[Store],
        /,
        *,
        done: StoreDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Stored]:
        return await self._guard(
            lambda: self.inner.store(batch, done=done, deadline=deadline), deadline
        )

    async def delete(self, keys: Sequence[Key], /) -> int:
        return await self._guard(lambda: self.inner.delete(keys), None)

    async def _guard(self, call: Callable[[], Awaitable[R]], deadline: float | None) -> R:
        now = self.context.clock.now
        if self.state is not State.CLOSED:
            if self.state is State.OPEN and now() >= self._until:
                self._change(State.HALF_OPEN, "trying again")
            else:
                raise Unavailable(
                    f"tier {self.context.tier} is resting after failures", retryable=False
                )
        try:
            result = await call()
        except BackendError as error:
            self._note(None if isinstance(error, (Unsupported, BufferTooSmall)) else str(error))
            raise
        except BaseException:
            # Cancelled. Late is the store's fault; otherwise the caller lost interest and nothing is known.
            late = deadline is not None and now() >= deadline
            if late or self.resting:
                self._note("no answer before the deadline")
            raise
        self._note(_reason(result))
        return result

    def _note(self, failure: str | None) -> None:
        if failure is None:
            self._failures = self._rests = 0
            if self.state is not State.CLOSED:
                self._change(State.CLOSED, "answers again")
            return
        self._failures += 1
        if self.state is State.HALF_OPEN or (
            self.state is State.CLOSED and self._failures >= self.config.open_after
        ):
            longest = min(self.config.pause * 2**self._rests, self.config.longest_pause)
            self._rests = min(self._rests + 1, 32)
            self._until = self.context.clock.now() + longest * self.context.random.uniform(0.5, 1.0)
            self._change(State.OPEN, failure)

    def _change(self, state: State, reason: str) -> None:
        self.state = state
        self.context.emit(HealthChanged(tier=self.context.tier, state=state.value, reason=reason))


def _reason(result: object) -> str | None:
    """The first error when every item of a batch failed for the store's sake."""
    errors = (
        [getattr(item, "error", None) for item in result]
        if isinstance(result, list | tuple)
        else []
    )
    if errors and all(error is not None and not isinstance(error, Corrupt) for error in errors):
        return str(errors[0])
    return None
