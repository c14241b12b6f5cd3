"""``BlockingBackend`` keeps the laws for a client whose calls block, with real threads and simulated ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from lmcache_core.memory.backend import MemoryConfig
from lmcache_core.spi import (
    MISSED,
    PRESENT,
    STORED,
    AbstractBackend,
    BlockingBackend,
    BufferTooSmall,
    Capabilities,
    Closed,
    Found,
    Key,
    Load,
    Loaded,
    LoadStatus,
    Store,
    Stored,
    Unavailable,
)
from lmcache_core.testing.backend import BackendTests
from lmcache_core.testing.contexts import simulated_context, test_context
from lmcache_core.testing.harness import run_real
from lmcache_core.testing.laws import broken_laws, run_laws
from lmcache_core.testing.simulation import run_simulated
from lmcache_core.testing.stateful import StatefulBackendTests


class BlockingDictionary(BlockingBackend):
    """A blocking client over a dictionary; ``gate`` makes its loads hang until it is set."""

    config_type = MemoryConfig
    capabilities = Capabilities(quiescence_s=1.0)

    def __init__(self, config: Any, context: Any, /) -> None:
        super().__init__(config, context)
        self.values: dict[Key, bytes] = {}
        self.lock = threading.Lock()
        self.gate: threading.Event | None = None
        self.began = threading.Event()
        self.closes = 0

    def lookup_blocking(self, keys: Sequence[Key], /) -> Sequence[Found | None]:
        if self.gate:
            self.began.set()
            self.gate.wait(10)
        found = [self.values.get(key) for key in keys]
        return [None if value is None else Found(len(value)) for value in found]

    def load_blocking(self, load: Load, /) -> Loaded:
        self.began.set()
        if self.gate:
            self.gate.wait(10)
        value = self.values.get(load.key)
        if value is None:
            return MISSED
        if load.room < len(value):
            raise BufferTooSmall(f"{load.room} bytes for {len(value)}")
        load.into[0][: len(value)] = value
        return Loaded.filled(len(value))

    def store_blocking(self, store: Store, /) -> Stored:
        value = b"".join(store.parts)
        with self.lock:
            return STORED if self.values.setdefault(store.key, value) is value else PRESENT

    def delete_blocking(self, keys: Sequence[Key], /) -> int:
        with self.lock:
            return sum(self.values.pop(key, None) is not None for key in keys)

    def close_blocking(self) -> None:
        self.closes += 1

    def interrupt_blocking(self) -> None:
        if self.gate:
            self.gate.set()


class TestRealThreads(BackendTests):
    def make_backend(self) -> AbstractBackend:
        return BlockingDictionary(None, test_context())


class TestSimulatedThreads(BackendTests, StatefulBackendTests):
    simulated = True

    def make_backend(self) -> AbstractBackend:
        return BlockingDictionary(None, simulated_context(threads=2))


@pytest.mark.parametrize("seed", range(1, 6))
def test_laws_hold_in_other_histories(seed: int) -> None:
    class Other(TestSimulatedThreads):
        examples = 10

    Other.seed = seed
    assert not broken_laws(run_laws(Other))


KEYS = [Key(bytes(32), bytes([number] * 32)) for number in range(4)]


def loads(*numbers: int, room: int = 4) -> list[Load]:
    return [Load(KEYS[number], (memoryview(bytearray(room)),)) for number in numbers]


def real(body: Callable[[BlockingDictionary], Any]) -> None:
    async def main() -> None:
        store = BlockingDictionary(None, test_context())
        store.values = dict.fromkeys(KEYS, b"four")
        await store.open()
        await body(store)

    run_real(main(), 20)


class SecondThreadFails:
    """An executor that gets one thread and no other."""

    threads = 2

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.calls = 0

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("can't start new thread")
        future: Future[Any] = self.inner.submit(function, *args)
        return future


def test_item_without_a_thread_fails_alone_and_after_the_others() -> None:
    async def main() -> None:
        context = simulated_context()
        store = BlockingDictionary(None, context)
        store.values = dict.fromkeys(KEYS, b"four")
        object.__setattr__(context, "executor", SecondThreadFails(context.executor))
        results = await store.load(loads(0, 1, 2))
        assert [one.status for one in results] == [
            LoadStatus.FILLED,
            LoadStatus.FAILED,
            LoadStatus.FILLED,
        ]
        assert isinstance(results[1].error, Unavailable)

    run_simulated(main())


def test_os_error_of_one_item_is_its_own_unavailable() -> None:
    class Broken(BlockingDictionary):
        def load_blocking(self, load: Load, /) -> Loaded:
            if load.key == KEYS[1]:
                raise ConnectionResetError("peer went away")
            return super().load_blocking(load)

    async def main() -> None:
        store = Broken(None, simulated_context())
        results = await store.load(loads(0, 1))
        assert results[0] is MISSED
        assert isinstance(results[1].error, Unavailable)
        assert str(results[1].error) == "load failed: peer went away"

    run_simulated(main())


def test_cancelled_load_ends_by_interrupting_the_client() -> None:
    async def body(store: BlockingDictionary) -> None:
        store.gate = threading.Event()
        task = asyncio.ensure_future(store.load(loads(0)))
        await asyncio.to_thread(store.began.wait, 10)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert store.gate.is_set()

    real(body)


def test_failing_interrupt_does_not_end_the_wait() -> None:
    gate, inside = threading.Event(), threading.Event()

    class Stubborn(BlockingDictionary):
        def load_blocking(self, load: Load, /) -> Loaded:
            inside.set()
            gate.wait(10)
            return super().load_blocking(load)

        def interrupt_blocking(self) -> None:
            raise ValueError("cannot interrupt")

    async def main() -> None:
        store = Stubborn(None, test_context())
        task = asyncio.ensure_future(store.load(loads(0)))
        await asyncio.to_thread(inside.wait, 10)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done(), "ended while a thread still had the buffer"
        gate.set()
        await asyncio.wait([task])
        assert task.cancelled()

    with pytest.raises(ValueError, match="cannot interrupt"):  # the loop reports it, nobody else
        run_real(main(), 20)


def test_cancelled_lookup_leaves_at_once_and_close_waits_for_its_thread() -> None:
    async def body(store: BlockingDictionary) -> None:
        store.gate = threading.Event()
        task = asyncio.ensure_future(store.lookup(KEYS))
        await asyncio.to_thread(store.began.wait, 10)
        task.cancel()
        await asyncio.wait([task])
        assert not store.gate.is_set(), "a lookup borrows nothing: no reason to interrupt others"
        closing = asyncio.ensure_future(store.aclose())
        await asyncio.sleep(0.01)
        assert not closing.done()
        store.gate.set()
        await closing

    real(body)


def test_item_that_nobody_began_does_not_begin_after_cancellation() -> None:
    class Counting(BlockingDictionary):
        started = 0

        def load_blocking(self, load: Load, /) -> Loaded:
            self.started += 1
            return super().load_blocking(load)

    async def main() -> None:
        store = Counting(None, simulated_context(threads=1, latency_s=0.001))
        task = asyncio.ensure_future(store.load(loads(*[0] * 50)))
        await asyncio.sleep(0.002)
        task.cancel()
        await asyncio.wait([task])
        assert store.started < 50

    run_simulated(main())


def test_second_close_waits_for_the_first_and_disconnects_once() -> None:
    async def main() -> None:
        store = BlockingDictionary(None, simulated_context())
        await asyncio.gather(*(store.aclose() for _ in range(3)))
        assert store.closes == 1

    run_simulated(main())


def test_cancelled_close_still_disconnects() -> None:
    async def main() -> None:
        store = BlockingDictionary(None, simulated_context(latency_s=1.0))
        load = asyncio.ensure_future(store.load(loads(0)))
        await asyncio.sleep(0.0001)
        task = asyncio.ensure_future(store.aclose())
        await asyncio.sleep(0.0001)
        task.cancel()
        await asyncio.wait([task, load])
        assert store.closes == 1
        with pytest.raises(Closed):
            await store.call("usage", int)

    for seed in range(10):
        run_simulated(main(), seed)


@pytest.mark.parametrize("single", [False, True])
def test_loop_is_woken_for_single_answers_only_where_somebody_is_told(single: bool) -> None:
    async def body(store: BlockingDictionary) -> None:
        loop, woken, told = asyncio.get_running_loop(), [], []
        plain = loop.call_soon_threadsafe

        def counted(call: Any, *args: Any, **how: Any) -> Any:
            woken.append(call)
            return plain(call, *args, **how)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        done = (lambda at, result: told.append(at)) if single else None
        answers = store._answers("load", loads(0, 1, 2), done)
        for at in range(3):
            answers.tell(at, MISSED)
            await asyncio.sleep(0)
        await answers.all
        assert (len(woken), told) == ((3, [0, 1, 2]) if single else (1, []))
        assert answers.results == [MISSED] * 3

    real(body)


def test_a_batch_of_which_nobody_is_told_ends_though_its_threads_answer_late() -> None:
    async def main() -> None:
        store = BlockingDictionary(None, simulated_context(latency_s=1.0))
        await store.open()
        async with asyncio.timeout(10):
            results = await store.load(loads(0, 1, 2))
        assert results == [MISSED] * 3
        await store.aclose()

    run_simulated(main(), 1)
