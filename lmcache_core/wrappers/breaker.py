"""Stops asking a store that does not answer, and finds out gently when it is back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lmcache_core.spi import (
    AbstractBackend,
    BackendError,
    BufferTooSmall,
    Context,
    Corrupt,
    Duration,
    HealthChanged,
    Unavailable,
    Unsupported,
)
from lmcache_core.wrappers.around import Around, Call, Done


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerOptions:
    """Attributes:

    open_after: failures in a row that open it.
    pause: first rest; doubles with each failed probe.
    longest_pause: bound of the rest; so late at most is a store that is back found again.
    """

    open_after: int = 5
    pause: Duration = Duration(1.0)
    longest_pause: Duration = Duration(4.0)


class State(Enum):
    """Where a breaker is."""

    CLOSED = "closed"
    HALF_OPEN = "half open"
    OPEN = "open"


class Breaker(Around):
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

    async def around(
        self,
        verb: str,
        batch: Sequence[Any],
        call: Call,
        done: Done | None,
        deadline: float | None,
        /,
    ) -> Any:
        now = self.context.clock.now
        if self.state is State.OPEN and now() >= self._until:
            self._change(State.HALF_OPEN, "trying again")
        elif self.state is not State.CLOSED:
            message = f"tier {self.context.tier} is resting after failures"
            raise Unavailable(message, operation=verb, retryable=False)
        try:
            result = await call(batch, done)
        except BackendError as error:
            self._note(None if isinstance(error, (Unsupported, BufferTooSmall)) else str(error))
            raise
        except BaseException:
            # Cancelled. Late is the store's fault; otherwise the caller lost interest and nothing is known.
            if (deadline is not None and now() >= deadline) or self._probing():
                self._note("no answer before the deadline")
            raise
        self._note(_reason(result))
        return result

    def _probing(self) -> bool:
        return self.state is State.HALF_OPEN

    def _note(self, failure: str | None) -> None:
        if failure is None:
            self._failures = self._rests = 0
            if self.state is not State.CLOSED:
                self._change(State.CLOSED, "answers again")
            return
        self._failures += 1
        if self._probing() or (
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
    items = result if isinstance(result, list | tuple) else []
    errors = [getattr(item, "error", None) for item in items]
    if errors and all(error is not None and not isinstance(error, Corrupt) for error in errors):
        return str(errors[0])
    return None
