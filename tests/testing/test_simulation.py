"""The simulated world is deterministic, never waits, and is as unkind as the real one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest

from lmcache_core.testing.contexts import simulated_context
from lmcache_core.testing.simulation import SimClock, SimExecutor, Stuck, run_simulated


async def history(tasks: int = 6, turns: int = 4) -> list[object]:
    """What happened when, of some tasks that race through sleeps, threads and a lock."""
    events: list[object] = []
    lock, clock, executor = asyncio.Lock(), SimClock(), SimExecutor(threads=2)

    async def act(name: int) -> None:
        for turn in range(turns):
            await asyncio.sleep(0)
            async with lock:
                events.append((name, turn))
            await asyncio.wrap_future(executor.submit(events.append, (name, "thread")))
            await clock.sleep(0.5 * (name % 2))
        events.append(round(clock.now(), 9))

    async with asyncio.TaskGroup() as group:
        for name in range(tasks):
            group.create_task(act(name))
    return events


def test_one_seed_is_one_history() -> None:
    assert run_simulated(history(), 7) == run_simulated(history(), 7)


def test_seeds_give_different_histories() -> None:
    assert len({str(run_simulated(history(), seed)) for seed in range(20)}) > 15


def test_history_does_not_depend_on_the_process() -> None:
    program = (
        "import asyncio, importlib.util as u; from lmcache_core.testing.simulation import *;"
        f"s = u.spec_from_file_location('t', {__file__!r}); m = u.module_from_spec(s);"
        "s.loader.exec_module(m); print(run_simulated(m.history(), 11))"
    )
    shown = [
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": hashseed}, text=True,
            capture_output=True, check=True,
        ).stdout
        for hashseed in ("1", "2")
    ]  # fmt: skip
    assert shown[0] == shown[1] == f"{run_simulated(history(), 11)}\n"


def test_a_year_takes_no_time() -> None:
    started = time.monotonic()

    async def year() -> float:
        await SimClock().sleep(365 * 86400)
        return SimClock().now()

    assert run_simulated(year()) == 365 * 86400
    assert time.monotonic() - started < 5


def test_plain_callbacks_keep_their_order() -> None:
    async def ordered() -> list[int]:
        seen: list[int] = []
        loop = asyncio.get_running_loop()
        for number in range(50):
            loop.call_soon(seen.append, number)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return seen

    for seed in range(5):
        assert run_simulated(ordered(), seed) == list(range(50))


def test_task_is_never_run_before_a_callback_queued_earlier() -> None:
    async def racing() -> bool:
        seen: list[str] = []
        asyncio.get_running_loop().call_soon(seen.append, "callback")
        tasks = [asyncio.ensure_future(asyncio.sleep(0)) for _ in range(4)]
        await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        return seen == ["callback"]

    assert all(run_simulated(racing(), seed) for seed in range(10))


def test_waiting_for_ever_is_an_error_that_names_the_waiter() -> None:
    async def forgotten() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stuck, match=r"waits for ever \(seed 3\).*forgotten"):
        run_simulated(forgotten(), 3)


def test_endless_loop_is_an_error() -> None:
    async def spinning() -> None:
        while True:  # noqa: ASYNC110  # waits for nothing on purpose
            await asyncio.sleep(1)

    with pytest.raises(Stuck, match="no end after 100 turns"):
        run_simulated(spinning(), limit=100)


def test_exception_in_a_callback_fails_the_simulation() -> None:
    async def careless() -> None:
        asyncio.get_running_loop().call_soon(int, "no number")
        await asyncio.sleep(1)

    with pytest.raises(ValueError, match="no number"):
        run_simulated(careless())


def test_task_left_behind_is_cancelled() -> None:
    seen: list[str] = []

    async def lingering() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            seen.append("cancelled")

    async def main() -> None:
        task = asyncio.ensure_future(lingering())
        assert not task.done()
        await asyncio.sleep(0)

    run_simulated(main())
    assert seen == ["cancelled"]


def test_executor_runs_no_more_calls_at_once_than_it_has_threads() -> None:
    async def busy() -> float:
        executor = SimExecutor(threads=2, latency_s=0)
        calls = [asyncio.wrap_future(executor.submit(executor.spend, 1.0)) for _ in range(6)]
        await asyncio.gather(*calls)
        return SimClock().now()

    assert run_simulated(busy()) == 3.0


def test_queued_call_can_be_cancelled_and_frees_its_place() -> None:
    async def cancelling() -> list[str]:
        executor, seen = SimExecutor(threads=1, latency_s=0), list[str]()
        first = asyncio.wrap_future(executor.submit(seen.append, "first"))
        second = executor.submit(seen.append, "second")
        third = asyncio.wrap_future(executor.submit(seen.append, "third"))
        assert second.cancel()
        await asyncio.gather(first, third)
        return seen

    assert run_simulated(cancelling()) == ["first", "third"]


def test_call_may_have_its_effect_before_or_after_the_caller_looks() -> None:
    async def look() -> tuple[bool, bool]:
        effect: list[int] = []
        future = simulated_context().executor.submit(effect.append, 1)
        await asyncio.sleep(0.0005)
        return bool(effect), future.done()

    seen = {run_simulated(look(), seed) for seed in range(60)}
    assert seen == {(False, False), (True, False), (True, True)}


def test_exception_of_a_call_reaches_its_caller() -> None:
    async def failing() -> None:
        await asyncio.wrap_future(SimExecutor().submit(int, "no number"))

    with pytest.raises(ValueError, match="no number"):
        run_simulated(failing())


def test_wall_clock_can_be_stepped_without_moving_time() -> None:
    async def stepped() -> tuple[float, float]:
        clock = SimClock()
        before = clock.wall()
        clock.skew = -3600
        return clock.wall() - before, clock.now()

    assert run_simulated(stepped()) == (-3600, 0)
