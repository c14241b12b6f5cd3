"""Threads of a simulation: real ones, of which exactly one runs at a time, when the loop says so.

Code that blocks (a client of the daemon) runs unchanged in them: what would wait in the kernel hands the baton
back to the loop instead, and takes it again when the loop wakes it. So a history stays one order of events,
the same in every process.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any, TypeVar

from lmcache_core.testing.simulation import SimLoop
from tests.simulation.lives import LIFE

T = TypeVar("T")


class Killed(BaseException):
    """The simulated process of this thread is gone."""


class SimThread:
    """One thread of a simulated process.

    Attributes:
        pid: of its process.
        kin: threads of the same process; new ones are added.
        over: it has ended.
        killed: it never runs product code again.
        life: the one it ends with, 0 for none.
    """

    current: SimThread | None = None

    def __init__(self, loop: SimLoop, target: Callable[..., Any], *args: Any) -> None:
        self.loop = loop
        self.over = self.killed = False
        self.error: BaseException | None = None
        """What it ended with; whoever waits for ``ended`` raises it."""
        self.pid = 0
        self.kin: list[SimThread] = []
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._waiting = True
        self._joining: list[SimThread] = []
        self.ended: asyncio.Future[None] = loop.create_future()
        self.life = LIFE.get()
        self._context, self._around = copy_context(), copy_context()  # inside and on the loop
        self._thread = threading.Thread(target=self._run, args=(target, args), daemon=True)

    def start(self) -> None:
        self._thread.start()
        self.wake()

    def _run(self, target: Callable[..., Any], args: Any) -> None:
        self._go.acquire()
        asyncio._set_running_loop(self.loop)
        try:
            if not self.killed:
                self._context.run(target, *args)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001  # raised where the history can see it
            self.error = error
        self.over = True
        self._back.release()

    def _resume(self) -> None:
        """In the loop: run until the thread waits again, or has ended."""
        if self.over:
            return
        before, SimThread.current = SimThread.current, self
        self._go.release()
        self._back.acquire()
        SimThread.current = before
        if self.over:
            for each in self._joining:
                each.wake()
            if not self.ended.done():
                self.ended.set_result(None)

    def wake(self) -> None:
        """Let the thread go on, soon."""
        if self._waiting and not self.over:
            self._waiting = False
            self.loop.call_soon(self._resume, context=self._around)

    def wait(self, until: float | None = None) -> None:
        """In the thread: until somebody wakes it, or until then; which of both the caller looks up itself."""
        self._waiting = True
        timer = None if until is None else self.loop.call_at(until, self.wake)
        self._back.release()
        self._go.acquire()
        if timer is not None:
            timer.cancel()
        if self.killed:
            raise Killed

    def kill(self) -> None:
        """In the loop: end the thread where it waits."""
        self.killed = True
        if not self._thread.is_alive():
            self.over = True
            return
        while not self.over:  # its ``finally`` clauses may wait once more
            self._waiting = False
            self._resume()

    def join(self, timeout: float | None = None) -> None:
        me = running()
        if not self.over:
            self._joining.append(me)
            me.wait(None if timeout is None else self.loop.time() + timeout)

    def is_alive(self) -> bool:
        return not self.over


def running() -> SimThread:
    """The thread that runs now."""
    assert SimThread.current is not None, "not in a thread of the simulation"
    return SimThread.current


def sleep(seconds: float) -> None:
    """``time.sleep`` in virtual time."""
    me = running()
    until = me.loop.time() + max(0.0, seconds)
    while me.loop.time() < until:
        me.wait(until)


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the loop and wait for it in this thread."""
    me = running()
    task = me.loop.create_task(work)
    task.add_done_callback(lambda _: me.wake())
    try:
        while not task.done():
            me.wait()
    except Killed:
        task.cancel()
        raise
    return task.result()


class SimLock:
    """``threading.Lock`` between threads of one simulation."""

    def __init__(self) -> None:
        self.held = False
        self._queue: deque[SimThread] = deque()

    def __enter__(self) -> None:
        while self.held:
            me = running()
            self._queue.append(me)
            me.wait()
        self.held = True

    def __exit__(self, *exc: object) -> None:
        self.held = False
        if self._queue:
            self._queue.popleft().wake()


class SimEvent:
    """``threading.Event`` between threads of one simulation."""

    def __init__(self) -> None:
        self._set = False
        self._queue: list[SimThread] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        queue, self._queue = self._queue, []
        for each in queue:
            each.wake()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        me = running()
        until = None if timeout is None else me.loop.time() + timeout
        while not self._set and (until is None or me.loop.time() < until):
            self._queue.append(me)
            me.wait(until)
        return self._set


def threading_of(loop: SimLoop) -> SimpleNamespace:
    """What stands for the module ``threading``."""

    def make(_: None, target: Callable[..., Any], name: str, args: Any, **how: Any) -> SimThread:
        thread = SimThread(loop, target, *args)
        thread.kin, thread.pid = running().kin, running().pid
        thread.kin.append(thread)
        return thread

    return SimpleNamespace(Lock=SimLock, Event=SimEvent, Thread=make, current_thread=running)
