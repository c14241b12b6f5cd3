"""A deterministic world: virtual time, a seeded scheduler, and threads that are only pretended.

Nothing here sleeps or starts a thread. One seed is one history, in every process: what runs next depends
on the seed and on the program, never on the machine. ``asyncio`` promises first-in-first-out order for plain
callbacks and none between tasks; so tasks that could run at the same moment run in an order drawn from the
seed, and everything else keeps its place.
"""

from __future__ import annotations

import asyncio
import random
from asyncio import base_events
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

EPOCH = 1_700_000_000.0
"""``SimClock.wall()`` when a simulation starts."""


class Stuck(AssertionError):
    """A simulation can never end: nothing is ready and nothing is scheduled, or it ran too many steps."""


class SimTask(asyncio.Task[Any]):
    """A task hashed by its number, so that sets of tasks are visited in the same order in every process."""

    def __init__(self, *args: Any, loop: SimLoop, **kwargs: Any) -> None:
        self._number = loop.serial()
        super().__init__(*args, loop=loop, **kwargs)

    def __hash__(self) -> int:
        return self._number


class SimFuture(asyncio.Future[Any]):
    """A future hashed by its number, like ``SimTask``."""

    def __init__(self, *, loop: SimLoop) -> None:
        self._number = loop.serial()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class SimLoop(base_events.BaseEventLoop):
    """Event loop whose clock jumps to the next timer instead of waiting for it.

    Args:
        seed: chooses among tasks that are ready at the same moment, and feeds ``random``.
        limit: turns of the loop after which the simulation counts as stuck.

    Attributes:
        random: the source of every choice of this simulation; what draws from it becomes part of the history.
    """

    _ready: deque[asyncio.Handle]

    def __init__(self, seed: int = 0, *, limit: int = 1_000_000) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.seed = seed
        self.failures: list[BaseException] = []
        self._time = 0.0
        self._turns, self._limit = 0, limit
        self._serial = 0
        self._selector = self  # BaseEventLoop asks its selector how long to wait
        self._clock_resolution = 1e-6  # a jump lands within rounding of its timer, years on too

    def serial(self) -> int:
        """Next number of this simulation."""
        self._serial += 1
        return self._serial

    def time(self) -> float:
        return self._time

    def select(self, timeout: float | None) -> list[Any]:
        """Called by ``BaseEventLoop`` once per turn, before the ready callbacks run."""
        self._turns += 1
        if self._turns > self._limit:
            raise Stuck(f"no end after {self._limit} turns (seed {self.seed}){self._waiting()}")
        if timeout is None:
            raise Stuck(f"everybody waits for ever (seed {self.seed}){self._waiting()}")
        self._time += timeout
        if len(self._ready) > 1:
            self._mix()
        return []

    def create_future(self) -> SimFuture:
        return SimFuture(loop=self)

    def create_task(self, coro: Any, **kwargs: Any) -> SimTask:
        return SimTask(coro, loop=self, **kwargs)

    def run_in_executor(self, *_: Any) -> Any:  # type: ignore[override]  # refuses every call
        raise RuntimeError("a simulation has no real threads; use context.executor")

    def _mix(self) -> None:
        """Shuffle each run of task steps; callbacks between them stay where they are."""
        handles, run = list(self._ready), list[asyncio.Handle]()
        self._ready.clear()
        for handle in handles:
            owner = getattr(getattr(handle, "_callback", None), "__self__", None)
            if isinstance(owner, asyncio.Task):
                run.append(handle)
                continue
            self._flush(run)
            self._ready.append(handle)
        self._flush(run)

    def _flush(self, run: list[asyncio.Handle]) -> None:
        if len(run) > 1:
            self.random.shuffle(run)
        self._ready.extend(run)
        run.clear()

    def _waiting(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        return "".join(f"; {task.get_name()}: {task.get_coro()}" for task in tasks)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.failures.append(error or AssertionError(context["message"]))

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no events from outside."""

    def _write_to_self(self) -> None:
        """There is no other thread that had to be woken."""


def sim_loop() -> SimLoop:
    """The simulation that is running now.

    Raises:
        RuntimeError: there is none.
    """
    loop = asyncio.get_running_loop()
    if not isinstance(loop, SimLoop):
        raise RuntimeError("no simulation is running; use run_simulated")
    return loop


class SimClock:
    """``lmcache_core.spi.Clock`` in the virtual time of the simulation that is running when it is asked."""

    def __init__(self) -> None:
        self.skew = 0.0
        """Added to ``wall``; tests move it to simulate a stepped clock."""

    def now(self) -> float:
        return sim_loop().time()

    def wall(self) -> float:
        return EPOCH + self.skew + self.now()

    async def sleep(self, seconds: float, /) -> None:
        await asyncio.sleep(seconds)


class SimExecutor:
    """``lmcache_core.spi.Executor`` without threads: each call runs whole, at some moment of virtual time.

    A call waits for one of ``threads`` places, begins up to ``latency_s`` later, has all its effects at that
    moment, and is reported up to ``latency_s`` after that. So a caller may leave between effect and report,
    or before the effect, exactly as with real threads. Functions must not block on real primitives.

    Args:
        latency_s: bound of the two seeded delays; 0 runs calls as soon as there is a place for them.
    """

    def __init__(self, *, threads: int = 4, latency_s: float = 0.001) -> None:
        self.threads = threads
        self.latency_s = latency_s
        self._waiting: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._busy = 0
        self._spent = 0.0

    def submit(self, function: Callable[..., T], /, *args: Any) -> Future[T]:
        future: Future[T] = Future()
        self._waiting.append((future, function, args))
        self._admit()
        return future

    def spend(self, seconds: float) -> None:
        """Make the call that is running now take this much longer (a slow disk or server)."""
        self._spent += seconds

    def _admit(self) -> None:
        while self._waiting and self._busy < self.threads:
            self._busy += 1
            sim_loop().call_later(self._delay(), self._begin, *self._waiting.popleft())

    def _delay(self) -> float:
        random = sim_loop().random
        return random.choice((0.0, random.uniform(0.0, self.latency_s)))

    def _begin(
        self, future: Future[Any], function: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        if not future.set_running_or_notify_cancel():
            self._leave()
            return
        self._spent = 0.0
        report: Callable[[Any], None]
        outcome: Any
        try:
            report, outcome = future.set_result, function(*args)
        except BaseException as error:  # noqa: BLE001  # belongs to whoever waits, as with a real thread
            report, outcome = future.set_exception, error
        sim_loop().call_later(self._spent + self._delay(), self._end, report, outcome)

    def _end(self, report: Callable[[Any], None], outcome: Any) -> None:
        report(outcome)
        self._leave()

    def _leave(self) -> None:
        self._busy -= 1
        self._admit()


def run_simulated(coro: Coroutine[Any, Any, T], seed: int = 0, *, limit: int = 1_000_000) -> T:
    """Run a coroutine to its end in a simulation of its own and return its result.

    Tasks it leaves behind are cancelled and waited for, as ``asyncio.run`` does. An exception nobody took
    (of a callback or a task) is raised.

    Raises:
        Stuck: it can never end.
    """
    loop = SimLoop(seed, limit=limit)
    asyncio.set_event_loop(loop)
    try:
        result = loop.run_until_complete(coro)
        if left := sorted(asyncio.all_tasks(loop), key=hash):
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        if loop.failures:
            raise loop.failures[0]
        return result
    finally:
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # stuck, and reported as such
        asyncio.set_event_loop(None)
        loop.close()
