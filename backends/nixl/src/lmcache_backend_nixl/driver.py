"""One thread that moves everything of a tier while there is something to move.

NIXL may do a whole transfer inside the call that starts it (shared memory, buffered files), and its status call is what
makes others go on, so neither belongs on the event loop. An operation is a generator: it yields a ``Transfer``, a ``Call`` or
anything with ``ended``, and goes on when that has ended; what it failed with is thrown into it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from lmcache_core.spi import BackendError, Executor, Unavailable

EAGER_S, QUICK_S, SLOW_S = 0.002, 0.00005, 0.002
FEW = 16
"""With more operations than that under way, at most half of the time is spent asking whether they have ended."""


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

    def ended(self) -> bool:
        self.result = [task.result for task in self._tasks]
        return None not in self.result


@dataclass(slots=True)
class Driver:
    """Runs operations.

    Attributes:
        executor: gives the thread, and those for ``Call``.
        flush: called after every round, for what operations have collected.
    """

    executor: Executor
    flush: Callable[[], bool]
    _inbox: list[Task] = field(default_factory=list)
    _mutex: threading.Lock = field(default_factory=threading.Lock)
    _running: bool = False

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
        moved_at = time.monotonic()
        while True:
            with self._mutex:
                new, self._inbox = self._inbox, []
                if not new and not tasks:
                    self._running = False
                    return
            began, moved = time.monotonic(), bool(new)
            for task in new:
                self._advance(task, None)
            for task in tasks:
                moved |= self._look(task)
            moved |= self.flush()
            tasks = [task for task in (*tasks, *new) if task.waiting is not None]
            new = []
            now = time.monotonic()
            if moved:
                moved_at = now
            elif tasks:
                idle, spent = now - moved_at, now - began
                nap = 0 if idle < EAGER_S else QUICK_S if idle < 1 else SLOW_S
                time.sleep(max(nap, spent) if len(tasks) > FEW else nap)

    def _look(self, task: Task) -> bool:
        step = task.waiting
        assert step is not None
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
