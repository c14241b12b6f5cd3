"""The fakes are verified: left alone they pass the kit, and switched on they do exactly what they say."""

from __future__ import annotations

import pytest

from lmcache_core.memory.backend import MemoryBackend
from lmcache_core.spi import AbstractBackend, Key, Load, LoadStatus, Store, StoreStatus, Unavailable
from lmcache_core.testing.backend import BackendTests
from lmcache_core.testing.contexts import simulated_context
from lmcache_core.testing.fakes import Call, Flaky, Recording, Slow, Torn
from lmcache_core.testing.laws import broken_laws, run_laws
from lmcache_core.testing.simulation import SimClock, run_simulated

FAKES = [Flaky, Slow, Torn, Recording]


def memory() -> AbstractBackend:
    return MemoryBackend(MemoryBackend.testing_config(), simulated_context())


@pytest.mark.parametrize("fake", FAKES)
def test_fake_that_is_left_alone_obeys_every_law(fake: type[Flaky]) -> None:
    class Tests(BackendTests):
        simulated = True

        def make_backend(self) -> AbstractBackend:
            return fake(simulated_context(), memory())

    assert not broken_laws(run_laws(Tests))


def test_slow_backend_obeys_every_law() -> None:
    class Tests(BackendTests):
        simulated = True

        def make_backend(self) -> AbstractBackend:
            return Slow(simulated_context(), memory(), 0.0007)

    assert not broken_laws(run_laws(Tests))


KEY = Key(bytes(32), bytes(32))
STORE = Store(KEY, (memoryview(b"head"), memoryview(b"tail")))


def test_flaky_fails_as_scheduled_and_then_recovers() -> None:
    async def main() -> None:
        store = Flaky(simulated_context(), memory())
        await store.open()
        store.failures = [Unavailable("first"), None, Unavailable("third")]
        with pytest.raises(Unavailable, match="first"):
            await store.store([STORE])
        assert await store.lookup([KEY]) == [None]
        with pytest.raises(Unavailable, match="third"):
            await store.lookup([KEY])
        assert await store.lookup([KEY]) == [None]

    run_simulated(main())


def test_flaky_can_lose_the_reply_of_a_call_that_worked() -> None:
    async def main() -> None:
        store = Flaky(simulated_context(), memory())
        await store.open()
        store.failures, store.after = [Unavailable("reply lost")], True
        with pytest.raises(Unavailable, match="reply lost"):
            await store.store([STORE])
        assert (await store.store([STORE]))[0].status is StoreStatus.PRESENT

    run_simulated(main())


def test_slow_takes_its_time_on_the_given_clock() -> None:
    async def main() -> float:
        store = Slow(simulated_context(), memory(), 3600.0)
        await store.open()
        await store.store([STORE])
        await store.lookup([KEY])
        return SimClock().now()

    assert run_simulated(main()) == pytest.approx(7200.0)


@pytest.mark.parametrize("lie", [False, True])
def test_torn_leaves_the_head_of_a_value(lie: bool) -> None:
    async def main() -> bytes:
        store = Torn(simulated_context(), memory())
        await store.open()
        store.tear, store.lie = 6, lie
        if lie:
            assert (await store.store([STORE]))[0].status is StoreStatus.STORED
        else:
            with pytest.raises(Unavailable, match="died while writing"):
                await store.store([STORE])
        buffer = bytearray(8)
        (loaded,) = await store.load([Load(KEY, (memoryview(buffer),))])
        assert loaded.status is LoadStatus.FILLED
        return bytes(buffer[: loaded.nbytes])

    assert run_simulated(main()) == b"headta"


def test_recording_tells_what_was_asked_in_order() -> None:
    async def main() -> list[Call]:
        store = Recording(simulated_context(), memory())
        await store.open()
        await store.lookup([KEY])
        await store.store([STORE])
        await store.load([Load(KEY, (memoryview(bytearray(20)),))])
        await store.delete([KEY])
        return store.calls

    assert run_simulated(main()) == [
        Call("lookup", (KEY,)),
        Call("store", (KEY,), 8),
        Call("load", (KEY,), 20),
        Call("delete", (KEY,)),
    ]
