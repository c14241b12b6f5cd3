"""``PolledBackend`` keeps the laws for a transport that is posted to and polled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from lmcache_core.memory.backend import MemoryConfig
from lmcache_core.spi import (
    MISSED,
    PRESENT,
    STORED,
    AbstractBackend,
    BufferTooSmall,
    Capabilities,
    Closed,
    Found,
    Key,
    Load,
    Loaded,
    LoadStatus,
    PolledBackend,
    Store,
    Stored,
    Unavailable,
)
from lmcache_core.testing.backend import BackendTests
from lmcache_core.testing.contexts import simulated_context
from lmcache_core.testing.laws import broken_laws, run_laws
from lmcache_core.testing.simulation import run_simulated
from lmcache_core.testing.stateful import StatefulBackendTests


@dataclass(eq=False)
class Transfer:
    """One posted transfer: moves its bytes at ``due``, or never when it was aborted before."""

    item: Any
    due: float
    result: Any = None
    aborted: list[float] = field(default_factory=list)


class PolledDictionary(PolledBackend):
    config_type = MemoryConfig
    capabilities = Capabilities(iov_max=1, quiescence_s=0.1)
    delay_s = 0.003

    def __init__(self, config: Any, context: Any, /) -> None:
        super().__init__(config, context)
        self.values: dict[Key, bytes] = {}
        self.running: set[Transfer] = set()
        self.closes = 0

    def _post(self, item: Any) -> Transfer:
        delay = self.context.random.uniform(0, self.delay_s)
        transfer = Transfer(item, self.context.clock.now() + delay)
        self.running.add(transfer)
        asyncio.get_running_loop().call_later(delay, self._move, transfer)
        return transfer

    def post_load(self, load: Load, /) -> Transfer | Loaded:
        value = self.values.get(load.key)
        if value is None:
            return MISSED
        if load.room < len(value):
            raise BufferTooSmall(f"{load.room} bytes for {len(value)}")
        return self._post(load)

    def post_store(self, store: Store, /) -> Transfer | Stored:
        return PRESENT if store.key in self.values else self._post(store)

    def _move(self, transfer: Transfer) -> None:
        self.running.discard(transfer)
        item = transfer.item
        if isinstance(item, Load):
            value = self.values.get(item.key)
            if value is not None:
                item.into[0][: len(value)] = value
            transfer.result = MISSED if value is None else Loaded.filled(len(value))
        else:
            present = item.key in self.values
            self.values.setdefault(item.key, b"".join(item.parts))
            transfer.result = PRESENT if present else STORED
        transfer.item = None

    def check_load(self, handle: Transfer, /) -> Loaded | None:
        result: Loaded | None = handle.result
        return result

    def check_store(self, handle: Transfer, /) -> Stored | None:
        result: Stored | None = handle.result
        return result

    def abort(self, handle: Transfer, /) -> None:
        handle.aborted.append(self.context.clock.now())

    async def close_transport(self) -> None:
        assert not self.running
        self.closes += 1

    async def lookup(
        self, keys: Sequence[Key], /, *, deadline: float | None = None
    ) -> Sequence[Found | None]:
        self.check_open("lookup")
        found = [self.values.get(key) for key in keys]
        return [None if value is None else Found(len(value)) for value in found]

    async def delete(self, keys: Sequence[Key], /) -> int:
        self.check_open("delete")
        return sum(self.values.pop(key, None) is not None for key in keys)


class TestPolled(BackendTests, StatefulBackendTests):
    simulated = True

    def make_backend(self) -> AbstractBackend:
        return PolledDictionary(None, simulated_context(seed=self.seed))


@pytest.mark.parametrize("seed", range(1, 6))
def test_laws_hold_in_other_histories(seed: int) -> None:
    class Other(TestPolled):
        examples = 10

    Other.seed = seed
    assert not broken_laws(run_laws(Other))


KEYS = [Key(bytes(32), bytes([number] * 32)) for number in range(4)]


def loads(*numbers: int) -> list[Load]:
    return [Load(KEYS[number], (memoryview(bytearray(4)),)) for number in numbers]


def filled(backend: type[PolledDictionary]) -> PolledDictionary:
    store = backend(None, simulated_context())
    store.values = dict.fromkeys(KEYS, b"four")
    return store


def test_failing_post_waits_for_what_was_posted_before() -> None:
    class Broken(PolledDictionary):
        def post_load(self, load: Load, /) -> Transfer | Loaded:
            if load.key == KEYS[2]:
                raise ZeroDivisionError
            return super().post_load(load)

    async def main() -> None:
        store = filled(Broken)
        with pytest.raises(ZeroDivisionError):
            await store.load(loads(0, 1, 2, 3))
        assert not store.running, "raised while the transport still wrote"
        await store.aclose()
        assert store.closes == 1

    run_simulated(main())


def test_failing_done_waits_for_what_is_in_flight() -> None:
    def fail(index: int, result: Loaded) -> None:
        raise ZeroDivisionError

    async def main() -> None:
        store = filled(PolledDictionary)
        with pytest.raises(ZeroDivisionError):
            await store.load(loads(0, 1, 2, 3), done=fail)
        assert not store.running, "raised while the transport still wrote"

    run_simulated(main())


def test_os_error_of_a_post_is_the_result_of_its_item() -> None:
    class Broken(PolledDictionary):
        def post_load(self, load: Load, /) -> Transfer | Loaded:
            if load.key == KEYS[1]:
                raise ConnectionResetError("peer went away")
            return super().post_load(load)

    async def main() -> None:
        results = await filled(Broken).load(loads(0, 1, 2))
        assert [one.status for one in results] == [
            LoadStatus.FILLED,
            LoadStatus.FAILED,
            LoadStatus.FILLED,
        ]
        assert isinstance(results[1].error, Unavailable)

    run_simulated(main())


def test_cancellation_aborts_each_transfer_once_and_waits_for_it() -> None:
    seen: list[Transfer] = []

    class Watched(PolledDictionary):
        delay_s = 10.0

        def _post(self, item: Any) -> Transfer:
            seen.append(super()._post(item))
            return seen[-1]

        def abort(self, handle: Transfer, /) -> None:
            super().abort(handle)
            raise ValueError("cannot abort")

    async def main() -> None:
        store = filled(Watched)
        task = asyncio.ensure_future(store.load(loads(0, 1, 2)))
        await asyncio.sleep(0.0001)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.001)
        await asyncio.wait([task])
        assert task.cancelled()
        assert not store.running

    with pytest.raises(ValueError, match="cannot abort"):  # the loop reports it, nobody else
        run_simulated(main())
    assert [len(transfer.aborted) for transfer in seen] == [1, 1, 1]


def test_cancelled_close_waits_and_disconnects() -> None:
    async def main() -> None:
        store = filled(PolledDictionary)
        load = asyncio.ensure_future(store.load(loads(0)))
        await asyncio.sleep(0.00001)
        task = asyncio.ensure_future(store.aclose())
        await asyncio.sleep(0.00001)
        task.cancel()
        await asyncio.wait([task, load])
        assert task.cancelled()
        assert store.closes == 1
        await store.aclose()
        assert store.closes == 1
        with pytest.raises(Closed):
            await store.load(loads(0))

    run_simulated(main())
