"""Threads that may hang in the kernel without taking the process with them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonExecutor:
    """``lmcache_core.spi.Executor``: at most ``threads`` daemonic threads, started when first needed.

    A thread without work for ``idle_s`` ends.
    Unlike the standard library's pool nothing ever joins them, so a process with a hung tier still exits.

    Args:
        owner: shown in thread names (``OWNER-0``, ...), so that a stack dump tells whose call hangs.
        threads: most calls running at once; further calls wait in order.
    """

    def __init__(self, owner: str, threads: int = 4, *, idle_s: float = 10.0) -> None:
        if threads < 1:
            raise ValueError(f"executor of {owner!r} needs at least one thread, got {threads}")
        self.owner = owner
        self.threads = threads
        self.idle_s = idle_s
        self._calls: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._changed = threading.Condition()
        self._started = 0
        self._free = 0
        self._closed = False

    def submit(self, function: Callable[..., T], /, *args: Any) -> Future[T]:
        """Queue one call.

        Raises:
            RuntimeError: closed, or there is no thread and none can be started; the call will not run.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError(f"executor of {self.owner!r} is closed")
            self._calls.append((future, function, args))
            if len(self._calls) > self._free and self._started < self.threads:
                self._start()
            self._changed.notify()
        return future

    def close(self) -> None:
        """Let threads end once the queue is empty; waits for none of them. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _start(self) -> None:
        name = f"{self.owner}-{self._started}"
        try:
            threading.Thread(target=self._work, name=name, daemon=True).start()
        except RuntimeError:
            if not self._started:
                self._calls.pop()
                raise
        else:
            self._started += 1
            self._free += 1

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._calls:
                    waited = not self._closed and self._changed.wait(self.idle_s)
                    if not waited and not self._calls:
                        self._started -= 1
                        self._free -= 1
                        return
                future, function, args = self._calls.popleft()
                self._free -= 1
            if future.set_running_or_notify_cancel():
                try:
                    result = function(*args)
                except BaseException as error:  # noqa: BLE001  # belongs to whoever waits
                    del args  # before anybody is told: what was borrowed is given back
                    future.set_exception(error)
                else:
                    del args
                    future.set_result(result)
                    del result
            else:
                del args
            del future, function  # an idle thread keeps no borrowed memory alive
            with self._changed:
                self._free += 1
