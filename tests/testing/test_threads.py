"""Threads of a tier: bounded, in order, never in the way of the process's end."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from lmcache_core.threads import DaemonExecutor


def test_no_more_calls_run_at_once_than_there_are_threads() -> None:
    executor = DaemonExecutor("tier", 3)
    inside, most, lock = 0, 0, threading.Lock()
    barrier = threading.Barrier(3)

    def call() -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        barrier.wait(10)  # passes only if three are inside together
        with lock:
            inside -= 1

    for future in [executor.submit(call) for _ in range(12)]:
        future.result(10)
    assert most == 3
    executor.close()


def test_calls_on_one_thread_run_in_order() -> None:
    executor, seen = DaemonExecutor("tier", 1), list[int]()
    futures = [executor.submit(seen.append, number) for number in range(100)]
    futures[-1].result(10)
    assert seen == list(range(100))
    executor.close()


def test_idle_executor_has_no_thread_it_does_not_need() -> None:
    executor = DaemonExecutor("lonely-tier", 8)
    for _ in range(20):
        executor.submit(int).result(10)
    names = [thread.name for thread in threading.enumerate() if "lonely-tier" in thread.name]
    assert len(names) in (1, 2)
    assert names[0] == "lonely-tier-0"
    executor.close()


def test_thread_without_work_ends_and_a_later_call_gets_a_new_one() -> None:
    executor = DaemonExecutor("idle-tier", 2, idle_s=0.001)
    executor.submit(int).result(10)
    for thread in threading.enumerate():
        if "idle-tier" in thread.name:
            thread.join(10)
            assert not thread.is_alive()
    assert executor.submit(int, "7").result(10) == 7
    executor.close()


def test_exception_belongs_to_the_caller_and_the_thread_goes_on() -> None:
    executor = DaemonExecutor("tier", 1)
    with pytest.raises(ValueError, match="no number"):
        executor.submit(int, "no number").result(10)
    assert executor.submit(int, "7").result(10) == 7
    executor.close()


def test_closed_executor_finishes_its_queue_and_takes_no_more() -> None:
    executor, gate = DaemonExecutor("tier", 1), threading.Event()
    futures: list[Future[Any]] = [executor.submit(gate.wait, 10), executor.submit(int, "7")]
    executor.close()
    with pytest.raises(RuntimeError, match="executor of 'tier' is closed"):
        executor.submit(int)
    gate.set()
    assert [future.result(10) for future in futures] == [True, 7]


def test_call_that_gets_no_thread_is_refused_and_never_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    executor, seen = DaemonExecutor("tier", 2), list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            executor.submit(seen.append, 1)
    executor.submit(seen.append, 2).result(10)
    assert seen == [2]
    executor.close()


def test_executor_without_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one thread, got 0"):
        DaemonExecutor("tier", 0)


def test_hung_call_does_not_keep_the_process_alive() -> None:
    program = (
        "import threading; from lmcache_core.threads import DaemonExecutor;"
        "started = threading.Event();"
        "DaemonExecutor('tier', 1).submit(lambda: (started.set(), threading.Event().wait()));"
        "started.wait(); print('left')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=30, check=True
    )
    assert done.stdout == b"left\n"
