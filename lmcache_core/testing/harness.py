"""What the law classes for backends stand on: hooks, a runner without plugins, single-item verbs, keys.

The verbs here forgive what another law condemns (an exception for a miss, a missing result), so that a backend
that breaks one law fails the tests of that law and no others.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, ClassVar
from unittest import SkipTest

from lmcache_core.spi import (
    MISSED,
    AbstractBackend,
    BackendError,
    Found,
    Key,
    Load,
    Loaded,
    LoadStatus,
    Store,
    Stored,
    StoreStatus,
)
from lmcache_core.spi import backend as contract
from lmcache_core.testing.laws import Decorator, law, read_laws
from lmcache_core.testing.simulation import SimLoop, run_simulated

POISON = 0xEE
"""Never part of a value of ``BackendHarness.value``."""

BACKEND_LAWS = read_laws(contract.__doc__)

Body = Callable[..., Awaitable[None]]


def backend_law(number: str, *, needs: str = "", lacks: str = "") -> Decorator:
    """``law`` of a backend, for those that declare the capability ``needs`` and do not declare ``lacks``."""
    return law(number, BACKEND_LAWS[number], needs, lacks)


def poisoned(nbytes: int) -> tuple[memoryview]:
    """A buffer in which every byte that is not ``POISON`` was written by somebody."""
    return (memoryview(bytearray([POISON]) * nbytes),)


def run_real(main: Coroutine[Any, Any, None], limit_s: float) -> None:
    """Run a coroutine on a real event loop; one that never ends fails instead of hanging the run."""
    loop = asyncio.new_event_loop()
    failures: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    try:
        task = loop.create_task(main)
        loop.run_until_complete(asyncio.wait([task], timeout=limit_s))
        assert task.done(), f"not ended after {limit_s} s: {task.get_stack()}"
        task.result()
        left = asyncio.all_tasks(loop)
        for one in left:
            one.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=limit_s))
        for context in failures:
            raise context.get("exception") or AssertionError(context["message"])
    finally:
        loop.close()


class BackendHarness(ABC):
    """Hooks an author fills in, and what the laws use to talk to a backend.

    Attributes:
        simulated: run inside a simulation (then ``make_backend`` uses ``simulated_context``).
        seed: which simulation.
        limit_s: a test that takes longer fails.
        settle_s: how long a late writer is waited for.
        ttl_s: a time to live that the store can keep; expiry is waited for.
        own_threads: name prefixes of threads that a client library starts by itself (law B13); say why.
    """

    simulated: ClassVar[bool] = False
    seed: ClassVar[int] = 0
    limit_s: ClassVar[float] = 60.0
    settle_s: ClassVar[float] = 0.05
    ttl_s: ClassVar[float] = 0.05
    own_threads: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def make_backend(self) -> AbstractBackend:
        """Make a backend, not yet opened. Every call may start from an empty store; it need not."""

    def make_small_backend(self, nbytes: int) -> AbstractBackend | None:
        """Make one that is full after about ``nbytes``, or None."""
        return None

    def reopen(self, store: AbstractBackend) -> AbstractBackend | None:
        """Make another instance on the same store (closed before, if not ``shared``), or None."""
        return None

    def crash(self, store: AbstractBackend) -> AbstractBackend | None:
        """Make the instance found after the end that ``durability`` names hit ``store`` just now, or None."""
        return None

    def peek(self, key: Key) -> bytes | None:
        """Read a value behind the backend's back; None when it is absent."""
        raise SkipTest("no peek hook")

    def poke(self, key: Key, value: bytes) -> None:
        """Write a value behind the backend's back."""
        raise SkipTest("no poke hook")

    def damage(self, key: Key) -> None:
        """Spoil a stored value behind the backend's back."""
        raise SkipTest("no damage hook")

    def obey(self, body: Body, needs: str = "", lacks: str = "") -> None:
        """Run the body of a law on an open backend, unless a capability says that it does not apply."""

        async def main() -> None:
            self.choose_keys(asyncio.get_running_loop())
            async with self.opened(self.make_backend()) as store:
                if needs and not getattr(store.capabilities, needs):
                    raise SkipTest(f"does not declare {needs}")
                if lacks and getattr(store.capabilities, lacks):
                    raise SkipTest(f"declares {lacks}")
                await body(self, store)

        self.run(main())

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine where this class's tests run."""
        if self.simulated:
            run_simulated(main, self.seed)
        else:
            run_real(main, self.limit_s)

    def choose_keys(self, loop: asyncio.AbstractEventLoop) -> None:
        """Choose keys that no test used before."""
        self.nonce = loop.random.randbytes(16) if isinstance(loop, SimLoop) else os.urandom(16)

    @contextlib.asynccontextmanager
    async def opened(self, store: AbstractBackend) -> AsyncIterator[AbstractBackend]:
        """Open, and afterwards clear and close without complaint: those are laws of their own."""
        await store.open()
        try:
            yield store
        finally:
            for key in map(self.key, range(32)):
                with contextlib.suppress(Exception):
                    await store.delete([key])
            with contextlib.suppress(Exception):
                await store.aclose()

    def key(self, number: int) -> Key:
        """One of this test's keys; those below 32 are deleted when it ends."""
        space = hashlib.sha256(b"space" + self.nonce).digest()
        return Key(space, hashlib.sha256(b"%d" % number + self.nonce).digest(), number % 3)

    def value(self, number: int, nbytes: int = 999) -> bytes:
        """What ``put`` stores under ``key(number)``: no byte of it is ``POISON``."""
        content = hashlib.shake_128(b"%d" % number).digest(nbytes)
        return content.replace(bytes([POISON]), b"\x11")

    def sizes(self, store: AbstractBackend, *wanted: int) -> list[int]:
        """Those lengths that the store takes."""
        limit = store.capabilities.max_value
        return [nbytes for nbytes in wanted if limit is None or nbytes <= limit]

    async def put(self, store: AbstractBackend, number: int, nbytes: int = 999) -> bytes:
        """Store ``value(number)`` and wait until it is there."""
        value = self.value(number, nbytes)
        stored = await self.store_one(store, number, value)
        assert stored.status is StoreStatus.STORED, f"store of {nbytes} bytes said {stored}"
        await self.appear(store, number)
        return value

    async def appear(self, store: AbstractBackend, number: int) -> None:
        """Wait for a value that was acknowledged too early."""
        for _ in range(100):
            if await self.find(store, number) is not None:
                return
            await asyncio.sleep(0.001)
        raise AssertionError("a stored value never appeared")

    async def store_one(self, store: AbstractBackend, number: int, value: bytes) -> Stored:
        """Store one value; an error is a result."""
        try:
            results = await store.store([Store(self.key(number), (memoryview(value),))])
        except BackendError as error:
            return Stored.failed(error)
        return results[0]

    def storing(
        self, store: AbstractBackend, number: int, value: bytes | bytearray
    ) -> asyncio.Future[Sequence[Stored]]:
        """Begin to store one value."""
        item = Store(self.key(number), (memoryview(value),))
        return asyncio.ensure_future(store.store([item]))

    async def load_into(self, store: AbstractBackend, load: Load) -> Loaded:
        """Load one value; an error is a result."""
        try:
            results: Sequence[Loaded] = await store.load([load])
        except LookupError:
            return MISSED
        except BackendError as error:
            return Loaded.failed(error)
        return results[0] if results else MISSED

    async def find(self, store: AbstractBackend, number: int) -> Found | None:
        """Look one key up."""
        try:
            return next(iter(await store.lookup([self.key(number)])), None)
        except (BackendError, LookupError):
            return None

    async def get(self, store: AbstractBackend, number: int) -> bytes | None:
        """Load one whole value into a buffer of its length; None when it is absent."""
        if (found := await self.find(store, number)) is None:
            return None
        buffer = bytearray(found.nbytes)
        loaded = await self.load_into(store, Load(self.key(number), (memoryview(buffer),)))
        if loaded.status is LoadStatus.MISSED:
            return None
        assert loaded.status is LoadStatus.FILLED, f"load said {loaded}"
        return bytes(buffer)

    def moments(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """Waits after which to interrupt something: some turns of the loop, some time."""
        pauses = (0.0001, 0.0005, 0.001, 0.002)
        return [partial(_turn, turns) for turns in (0, 1, 2, 3, 4, 6, 9)] + [
            partial(asyncio.sleep, pause) for pause in pauses
        ]

    async def settle(self) -> None:
        """Give late writers their chance."""
        await asyncio.sleep(self.settle_s)


async def _turn(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)
