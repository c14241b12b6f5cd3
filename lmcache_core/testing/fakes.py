"""Backends that misbehave on demand; left alone they obey every law, which their own tests prove.

Each is a ``Wrapper`` around any backend, so that what is tested above them meets the faults of a real store.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from lmcache_core.spi import (
    AbstractBackend,
    BackendError,
    Context,
    Found,
    Key,
    Load,
    LoadDone,
    Loaded,
    Store,
    Stored,
    StoreDone,
    Unavailable,
    Wrapper,
)

T = TypeVar("T")
PACE_NBYTES = 1 << 16
"""Steps in which a link's rate is looked at."""


class _Fake(Wrapper):
    """Sends the four verbs through ``around``, which may delay, refuse or note them."""

    def __init__(self, context: Context, inner: AbstractBackend, /) -> None:
        super().__init__(None, context, inner)

    async def around(
        self, verb: str, batch: Sequence[Any], call: Callable[[], Awaitable[T]], /
    ) -> T:
        return await call()

    async def lookup(
        self, keys: Sequence[Key], /, *, deadline: float | None = None
    ) -> Sequence[Found | None]:
        return await self.around("lookup", keys, lambda: self.inner.lookup(keys, deadline=deadline))

    async def load(
        self,
        batch: Sequence[Load],
        /,
        *,
        done: LoadDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Loaded]:
        return await self.around(
            "load", batch, lambda: self.inner.load(batch, done=done, deadline=deadline)
        )

    async def store(
        self,
        batch: Sequence[Store],
        /,
        *,
        done: StoreDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Stored]:
        return await self.around(
            "store", batch, lambda: self.inner.store(batch, done=done, deadline=deadline)
        )

    async def delete(self, keys: Sequence[Key], /) -> int:
        return await self.around("delete", keys, lambda: self.inner.delete(keys))


class Flaky(_Fake):
    """Fails calls on schedule.

    Attributes:
        failures: errors for the next calls, None for a call that goes through; when empty all go through.
        after: raise the error after the call has had its effect, as a lost reply does.
    """

    def __init__(self, context: Context, inner: AbstractBackend, /) -> None:
        super().__init__(context, inner)
        self.failures: list[BackendError | None] = []
        self.after = False

    async def around(
        self, verb: str, batch: Sequence[Any], call: Callable[[], Awaitable[T]], /
    ) -> T:
        error = self.failures.pop(0) if self.failures else None
        if error and self.after:
            await call()
        if error:
            raise error
        return await call()


class Slow(_Fake):
    """Takes ``seconds`` of the context's clock before each call; a cancelled wait touches nothing."""

    def __init__(
        self, context: Context, inner: AbstractBackend, /, seconds: float | None = None
    ) -> None:
        super().__init__(context, inner)
        self.seconds = seconds

    async def around(
        self, verb: str, batch: Sequence[Any], call: Callable[[], Awaitable[T]], /
    ) -> T:
        if self.seconds is not None:
            await self.context.clock.sleep(self.seconds)
        return await call()


class Paced(_Fake):
    """A link of limited speed: values that calls load pass it one after the other.

    What was asked for at once follows without a gap, however long the caller looks at what has come.

    Attributes:
        rate: bytes per second, given the clock's time.
        free: clock time at which the last byte asked for has passed.
    """

    def __init__(
        self, context: Context, inner: AbstractBackend, /, rate: Callable[[float], float]
    ) -> None:
        super().__init__(context, inner)
        self.rate = rate
        self.free = 0.0

    async def load(
        self,
        batch: Sequence[Load],
        /,
        *,
        done: LoadDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Loaded]:
        results, asked = list[Loaded](), self.context.clock.now()
        for at, item in enumerate(batch):
            await self._pass(item.room if item.length is None else item.length, asked)
            results += await self.inner.load([item], deadline=deadline)
            if done is not None:
                done(at, results[at])
        return results

    async def _pass(self, nbytes: int, asked: float) -> None:
        now = self.context.clock.now
        due = max(self.free, asked)
        while nbytes > 0:
            step = min(nbytes, PACE_NBYTES)
            due += step / self.rate(due)
            nbytes -= step
        self.free = due
        await self.context.clock.sleep(max(0.0, due - now()))


class Torn(_Fake):
    """Dies in the middle of writing.

    Attributes:
        tear: each armed store keeps only so many leading bytes of every value, under the right key.
        lie: say ``STORED`` all the same (a disk without a working flush), else ``Unavailable``.
    """

    def __init__(self, context: Context, inner: AbstractBackend, /) -> None:
        super().__init__(context, inner)
        self.tear: int | None = None
        self.lie = False

    async def store(
        self,
        batch: Sequence[Store],
        /,
        *,
        done: StoreDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Stored]:
        if self.tear is None:
            return await super().store(batch, done=done, deadline=deadline)
        torn = [replace(store, parts=_head(store.parts, self.tear)) for store in batch]
        if self.lie:
            return await super().store(torn, done=done, deadline=deadline)
        await super().store(torn, deadline=deadline)
        raise Unavailable("died while writing", operation="store")


def _head(parts: Sequence[memoryview], nbytes: int) -> tuple[memoryview, ...]:
    kept = []
    for part in parts:
        kept.append(part[:nbytes])
        nbytes -= kept[-1].nbytes
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded call: the verb, its keys, and the bytes it moved or asked room for."""

    verb: str
    keys: tuple[Key, ...]
    nbytes: int = 0


class Recording(_Fake):
    """Remembers every call in ``calls``, oldest first; keeps keys and lengths, never a view (B4)."""

    def __init__(self, context: Context, inner: AbstractBackend, /) -> None:
        super().__init__(context, inner)
        self.calls: list[Call] = []

    async def around(
        self, verb: str, batch: Sequence[Any], call: Callable[[], Awaitable[T]], /
    ) -> T:
        if verb in ("load", "store"):
            nbytes = sum(item.room if verb == "load" else item.nbytes for item in batch)
            self.calls.append(Call(verb, tuple(item.key for item in batch), nbytes))
        else:
            self.calls.append(Call(verb, tuple(batch)))
        return await call()
