"""One thread that moves everything of a tier while there is something to move.

NIXL may do a whole transfer inside the call that starts it (shared memory, buffered files), and its status call is what
makes others go on, so neither belongs on the event loop. An operation is a generator: it yields a ``Transfer``, a ``Call`` or
anything with ``ended``, and goes on when that has ended; what it failed with is thrown into it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from lmcache_core.spi import BackendError, Executor, Unavailable

EAGER_S, QUICK_S, SLOW_S = 0.002, 0.00005, 0.002
"""Without pause first, then with short ones; after a second without a change with long ones."""
FEW = 16
"""With more operations than that under way, at most half of the time is spent asking whether they have ended."""
TOGETHER_S = 0.001
"""What happens within this time is sent, and told, at once: others work meanwhile, and are not woken for each."""


class Step(Protocol):
    """What an operation waits for."""

    result: Any
    """Of the step, once it has ended."""

    def begin(self, executor: Executor, /) -> None: ...
    def ended(self) -> bool:
        """Whether it has; raises what it failed with."""


Operation = Generator[Step, Any, Any]


class Call:
    """A function that blocks, on a thread of its own."""

    __slots__ = ("_arguments", "_function", "_future", "result")

    def __init__(self, function: Callable[..., Any], /, *arguments: Any) -> None:
        self._function, self._arguments = function, arguments
        self._future: Future[Any] | None = None
        self.result: Any = None

    def begin(self, executor: Executor, /) -> None:
        self._future = executor.submit(self._function, *self._arguments)

    def ended(self) -> bool:
        assert self._future is not None
        if not self._future.done():
            return False
        self.result = self._future.result()
        return True


@dataclass(slots=True, eq=False)
class Task:
    """An operation under way; ``result`` is set once, when nothing of it touches memory any more."""

    operation: Operation | None
    failed: Callable[[BackendError], Any]
    result: Any = None
    waiting: Step | None = None
    aborted: bool = False
    """Nobody wants the result: what has begun ends, nothing further begins but what its operation does at its end."""
    given_up: bool = False


class Together:
    """Operations that run beside each other from now on; ``result`` is the list of theirs."""

    __slots__ = ("_tasks", "result")

    def __init__(
        self, driver: Driver, operations: Sequence[Operation], failed: Callable[[BackendError], Any]
    ) -> None:
        self._tasks = [driver.start(operation, failed) for operation in operations]
        self.result: list[Any] = []

    def begin(self, executor: Executor, /) -> None:
        pass  # since it was made

    def abort(self) -> None:
        for task in self._tasks:
            task.aborted = True

    def ended(self) -> bool:
        self.result = [task.result for task in self._tasks]
        return None not in self.result


class News:
    """Wakes those who wait on an event loop; told of by a thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._telling = False

    async def wait(self, seconds: float, /) -> None:
        """Until there is news, or so many seconds have passed. Look before, without an ``await`` between."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # what was told before, nobody heard
            self._loop, seconds = loop, 0.0
        news = loop.create_future()
        self._waiting.append(news)
        timer = loop.call_later(seconds, self._wake)
        try:
            await news
        finally:
            timer.cancel()

    def tell(self) -> None:
        """There is news. What ``_wake`` is yet to tell of anyway is seen by whoever it wakes."""
        if self._loop is not None and not self._telling:
            self._telling = True
            with suppress(RuntimeError):  # the loop has been closed
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._telling = False
        waiting, self._waiting = self._waiting, []
        for news in waiting:
            if not news.done():
                news.set_result(None)


@dataclass(slots=True)
class Driver:
    """Runs operations.

    Attributes:
        executor: gives the thread, and those for ``Call``.
        flush: called after every round and within long ones, for what operations have collected.
        wait: let so many seconds pass, or fewer where there is news.
        told: called when operations have ended, soon after.
    """

    executor: Executor
    flush: Callable[[], bool]
    wait: Callable[[float], None]
    told: Callable[[], None]
    _inbox: list[Task] = field(default_factory=list)
    _mutex: threading.Lock = field(default_factory=threading.Lock)
    _running: bool = False
    _untold: bool = False

    def start(self, operation: Operation, failed: Callable[[BackendError], Any], /) -> Task:
        """Begin; from any thread."""
        task = Task(operation, failed)
        with self._mutex:
            self._inbox.append(task)
            if not self._running:
                try:
                    self.executor.submit(self._run)
                except RuntimeError as error:
                    self._inbox.remove(task)
                    raise Unavailable(f"no thread: {error}") from error
                self._running = True
        return task

    def _run(self) -> None:
        tasks: list[Task] = []
        moved_at = told_at = time.monotonic()
        while True:
            if self._untold and (len(tasks) <= FEW or time.monotonic() > told_at + TOGETHER_S):
                self._untold, told_at = False, time.monotonic()
                self.told()
            with self._mutex:
                new, self._inbox = self._inbox, []
                if not new and not tasks:
                    self._running = False
                    return
            began = flushed_at = time.monotonic()
            moved = bool(new)
            for task in new:
                self._advance(task, None)
            for task in tasks:
                # One look may have moved megabytes.
                if self._look(task):
                    moved = True
                    if time.monotonic() > flushed_at + TOGETHER_S:
                        self.flush()
                        flushed_at = time.monotonic()
            moved |= self.flush()
            tasks = [task for task in (*tasks, *new) if task.waiting is not None]
            new = []
            now = time.monotonic()
            if moved:
                moved_at = now
            elif tasks:
                idle, spent = now - moved_at, now - began
                nap = 0 if idle < EAGER_S else QUICK_S if idle < 1 else SLOW_S
                self.wait(max(nap, spent) if len(tasks) > FEW else nap)

    def _look(self, task: Task) -> bool:
        step = task.waiting
        assert step is not None
        if task.aborted and isinstance(step, Together):
            step.abort()
        try:
            if not step.ended():
                return False
        except (BackendError, OSError) as error:
            self._advance(task, error)
        else:
            self._advance(task, None, step.result)
        return True

    def _advance(self, task: Task, error: Exception | None, value: Any = None) -> None:
        """Go on until the operation waits for something that has not ended, or has itself."""
        operation = task.operation
        assert operation is not None
        task.waiting = None
        while True:
            try:
                step = operation.send(value) if error is None else operation.throw(error)
            except StopIteration as stopped:
                return self._finish(task, stopped.value)
            except BackendError as failure:
                return self._finish(task, task.failed(failure.with_traceback(None)))
            except OSError as failure:
                return self._finish(task, task.failed(Unavailable(str(failure).lower())))
            except Exception as failure:  # noqa: BLE001  # a bug ends one operation, not the thread
                return self._finish(task, task.failed(BackendError(f"{failure!r}")))
            error, value = None, None
            if task.aborted and not task.given_up and not isinstance(step, Together):
                task.given_up, error = True, Unavailable("given up")
                continue
            try:
                step.begin(self.executor)
                if not step.ended():
                    task.waiting = step
                    return None
                value = step.result
            except RuntimeError as failure:
                error = Unavailable(f"no thread: {failure}")
            except (BackendError, OSError) as failure:
                error = failure.with_traceback(None)

    def _finish(self, task: Task, result: Any) -> None:
        task.operation = None  # and with it every view it held
        task.result = result
        self._untold = True
