"""Backends that misbehave on demand; left alone they obey every law, which their own tests prove.

Each is a ``Wrapper`` around any backend, so that what is tested above them meets the faults of a real store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmcache_core.spi import AbstractBackend, BackendError, Context, Key, Loaded, Unavailable
from lmcache_core.wrappers.around import Around, Done
from lmcache_core.wrappers.around import Call as Inner

PACE_NBYTES = 1 << 16
"""Steps in which a link's rate is looked at."""


class _Fake(Around):
    """A wrapper without options."""

    def __init__(self, context: Context, inner: AbstractBackend, /) -> None:
        super().__init__(None, context, inner)


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
        self,
        verb: str,
        batch: Sequence[Any],
        call: Inner,
        done: Done | None,
        deadline: float | None,
        /,
    ) -> Any:
        error = self.failures.pop(0) if self.failures else None
        if error and self.after:
            await call(batch, done)
        if error:
            raise error
        return await call(batch, done)


class Slow(_Fake):
    """Takes ``seconds`` of the context's clock before each call; a cancelled wait touches nothing."""

    def __init__(
        self, context: Context, inner: AbstractBackend, /, seconds: float | None = None
    ) -> None:
        super().__init__(context, inner)
        self.seconds = seconds

    async def around(
        self,
        verb: str,
        batch: Sequence[Any],
        call: Inner,
        done: Done | None,
        deadline: float | None,
        /,
    ) -> Any:
        if self.seconds is not None:
            await self.context.clock.sleep(self.seconds)
        return await call(batch, done)


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

    async def around(
        self,
        verb: str,
        batch: Sequence[Any],
        call: Inner,
        done: Done | None,
        deadline: float | None,
        /,
    ) -> Any:
        if verb != "load":
            return await call(batch, done)
        results, asked = list[Loaded](), self.context.clock.now()
        for at, item in enumerate(batch):
            await self._pass(item.room if item.length is None else item.length, asked)
            results += await call([item], None)
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

    async def around(
        self,
        verb: str,
        batch: Sequence[Any],
        call: Inner,
        done: Done | None,
        deadline: float | None,
        /,
    ) -> Any:
        if verb != "store" or self.tear is None:
            return await call(batch, done)
        torn = [replace(store, parts=_head(store.parts, self.tear)) for store in batch]
        if self.lie:
            return await call(torn, done)
        await call(torn, None)
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
        self,
        verb: str,
        batch: Sequence[Any],
        call: Inner,
        done: Done | None,
        deadline: float | None,
        /,
    ) -> Any:
        if verb in ("load", "store"):
            nbytes = sum(item.room if verb == "load" else item.nbytes for item in batch)
            self.calls.append(Call(verb, tuple(item.key for item in batch), nbytes))
        else:
            self.calls.append(Call(verb, tuple(batch)))
        return await call(batch, done)
