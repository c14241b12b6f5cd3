"""``StatefulBackendTests``: Hypothesis drives a backend and ``MemoryBackend`` through the same history.

Every answer has to agree. Where a law leaves a backend a choice (a refusal, the outcome of a cancelled call) the
specification is brought to the state that the backend chose.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lmcache_core.memory.backend import MemoryBackend, MemoryConfig
from lmcache_core.spi import (
    AbstractBackend,
    ByteSize,
    Load,
    Store,
    StoreStatus,
)
from lmcache_core.testing.contexts import simulated_context, test_context
from lmcache_core.testing.harness import POISON, BackendHarness
from lmcache_core.testing.laws import law
from lmcache_core.testing.simulation import SimLoop

T = TypeVar("T")

NUMBERS = st.integers(0, 5)
GROUPS = st.lists(NUMBERS, max_size=6)
SIZES = st.sampled_from([1, 7, 300, 4096, 4097])
CONTENTS = st.tuples(NUMBERS, st.integers(0, 1), SIZES)
TURNS = st.integers(0, 6)


class StatefulBackendTests(BackendHarness):
    """One test: no history makes the backend answer otherwise than the specification.

    Attributes:
        examples: histories.
        steps: calls in one history.
        shrink: look for the shortest history that disagrees.
    """

    examples: ClassVar[int] = 50
    steps: ClassVar[int] = 30
    shrink: ClassVar[bool] = True

    @law("M1", "Model. No history makes a backend answer otherwise than MemoryBackend does.")
    def test_no_history_tells_it_from_the_specification(self) -> None:
        run_state_machine_as_test(
            lambda: Histories(self),  # type: ignore[arg-type]  # anything that makes a machine will do
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=self.steps,
                deadline=None,
                database=None,
                phases=set(Phase) if self.shrink else {Phase.generate},
                suppress_health_check=list(HealthCheck),
            ),
        )


class Histories(RuleBasedStateMachine):
    """The backend under test beside its specification, on one event loop of their own."""

    def __init__(self, tests: BackendHarness) -> None:
        super().__init__()
        self.tests = tests
        self.loop = SimLoop(tests.seed) if tests.simulated else asyncio.new_event_loop()
        tests.choose_keys(self.loop)
        context = simulated_context() if tests.simulated else test_context()
        self.model = MemoryBackend(MemoryConfig(ByteSize(1 << 40)), context)
        self.real = tests.make_backend()
        self.do(self.real.open())

    def do(self, call: Awaitable[T]) -> T:
        async def bounded() -> T:
            task = asyncio.ensure_future(call)
            await asyncio.wait([task], timeout=self.tests.limit_s)
            assert task.done(), "a verb did not end"
            return task.result()

        return self.loop.run_until_complete(bounded())

    def both(self, call: Callable[[AbstractBackend], Awaitable[T]]) -> tuple[T, T]:
        return self.do(call(self.real)), self.do(call(self.model))

    def stores(self, contents: Sequence[tuple[int, int, int]]) -> list[Store]:
        chosen = {number: (version, nbytes) for number, version, nbytes in contents}
        return [
            Store(self.tests.key(number), (memoryview(self.value(number, version, nbytes)),))
            for number, (version, nbytes) in chosen.items()
        ]

    def value(self, number: int, version: int, nbytes: int) -> bytes:
        return self.tests.value(100 * version + number, nbytes)

    @rule(group=GROUPS)
    def look_up(self, group: list[int]) -> None:
        keys = [self.tests.key(number) for number in group]
        real, model = self.both(lambda store: store.lookup(keys))
        assert [one and one.nbytes for one in real] == [one and one.nbytes for one in model]

    @rule(number=NUMBERS, slack=st.sampled_from([-1, 0, 5]))
    def load(self, number: int, slack: int) -> None:
        (found,) = self.do(self.model.lookup([self.tests.key(number)]))
        self.compare_loads(number, max(0, (found.nbytes if found else 9) + slack), 0, None)

    @precondition(lambda self: self.real.capabilities.ranges)
    @rule(
        number=NUMBERS,
        offset=st.integers(0, 5000),
        length=st.none() | st.integers(0, 5000),
        room=st.integers(0, 5000),
    )
    def load_part(self, number: int, offset: int, length: int | None, room: int) -> None:
        self.compare_loads(number, room, offset, length)

    def compare_loads(self, number: int, room: int, offset: int, length: int | None) -> None:
        answers = []
        for store in (self.real, self.model):
            buffer = bytearray([POISON]) * room
            load = Load(self.tests.key(number), (memoryview(buffer),), offset, length)
            (loaded,) = self.do(store.load([load]))
            answers.append((loaded.status, loaded.nbytes, type(loaded.error), buffer))
        assert answers[0] == answers[1]

    @rule(contents=st.lists(CONTENTS, max_size=4))
    def store(self, contents: list[tuple[int, int, int]]) -> None:
        batch = self.stores(contents)
        real, model = self.both(lambda store: store.store(batch))
        assert len(real) == len(model)
        for item, mine, theirs in zip(batch, real, model, strict=True):
            if mine.status is StoreStatus.REFUSED and theirs.status is StoreStatus.STORED:
                self.do(self.model.delete([item.key]))
            else:
                assert mine.status is theirs.status, f"store said {mine}, expected {theirs}"

    @rule(group=GROUPS)
    def delete(self, group: list[int]) -> None:
        keys = [self.tests.key(number) for number in group]
        real, model = self.both(lambda store: store.delete(keys))
        assert real == model, f"delete counted {real}, expected {model}"

    @rule(content=CONTENTS, turns=TURNS, verb=st.sampled_from(["load", "store", "delete"]))
    def cancel(self, content: tuple[int, int, int], turns: int, verb: str) -> None:
        (item,) = self.stores([content])
        buffer = bytearray(5000)
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "load": lambda: self.real.load([Load(item.key, (memoryview(buffer),))]),
            "store": lambda: self.real.store([item]),
            "delete": lambda: self.real.delete([item.key]),
        }

        async def cancelled() -> None:
            task = asyncio.ensure_future(calls[verb]())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            buffer[:] = bytes([POISON]) * len(buffer)
            await self.tests.settle()

        self.do(cancelled())
        assert buffer.count(POISON) == len(buffer), "a buffer was written after its load had ended"
        (real,), (model,) = self.both(lambda store: store.lookup([item.key]))
        if verb == "store" and real and not model:
            self.do(self.model.store([item]))
        if verb == "delete" and model and not real:
            self.do(self.model.delete([item.key]))
        self.load(content[0], 0)

    @rule(contents=st.lists(CONTENTS, min_size=3, max_size=3, unique_by=lambda one: one[0]))
    def overlap(self, contents: list[tuple[int, int, int]]) -> None:
        stored, (loaded,), (deleted,) = (self.stores(contents[i : i + 1]) for i in range(3))

        async def together(store: AbstractBackend) -> list[object]:
            into = (memoryview(bytearray(5000)),)
            stores, loads, count = await asyncio.gather(
                store.store(stored),
                store.load([Load(loaded.key, into)]),
                store.delete([deleted.key]),
            )
            return [stores[0].status, loads[0].status, loads[0].nbytes, bytes(into[0]), count]

        real, model = self.both(together)
        assert real == model

    @precondition(lambda self: self.real.capabilities.persistent)
    @rule()
    def reopen(self) -> None:
        self.do(self.real.aclose())
        again = self.tests.reopen(self.real)
        assert again is not None, "persistent, but there is no reopen hook"
        self.real = again
        self.do(self.real.open())

    def teardown(self) -> None:
        try:
            for number in range(6):
                self.load(number, 0)
            self.delete(list(range(6)))
            self.do(self.real.aclose())
        finally:
            self.loop.close()
