"""The storage manager for callers without an event loop, such as an engine's scheduler thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from lmcache_core.spi import BackendError, Closed, Key, Lease, Refusal, Reservation
from lmcache_core.storage.manager import StorageManager
from lmcache_core.storage.results import Flushed, Loaded, Lookup, Place, Reason, Shutdown

T = TypeVar("T")
GRACE_S = 1.0
"""How long past a deadline the loop thread may be busy before its answer is not waited for."""


class SyncManager:
    """Same verbs, blocking. What is resident is served in the calling thread, without a hop.

    Args:
        make: coroutine function that makes and opens the manager, run on the facade's own loop.

    Raises whatever ``make`` raises.
    """

    def __init__(self, make: Callable[[], Coroutine[Any, Any, StorageManager]], /) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopped = False
        self._gate = threading.Lock()
        """Whoever passes it before ``_stopped`` gets an answer from the loop."""
        # Daemonic: a tier that hangs in the kernel must not keep the process.
        self._thread = threading.Thread(target=self._serve, name="lmcache-storage", daemon=True)
        self._thread.start()
        try:
            self.manager = self._call(make(), None)
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise

    def lease(self, keys: Sequence[Key], owner: object, /) -> Sequence[Lease | None]:
        return self.manager.lease(keys, owner)

    def release(self, leases: Sequence[Lease | None], /) -> None:
        self.manager.release(leases)

    def reserve(
        self, wants: Sequence[tuple[Key, int]], owner: object, /, **how: Any
    ) -> Sequence[Reservation | Refusal]:
        return self.manager.reserve(wants, owner, **how)

    def commit(self, reservation: Reservation, identity: bytes, /) -> bool:
        return self.manager.commit(reservation, identity)

    def commit_batch(
        self,
        reservations: Sequence[Reservation],
        identities: Sequence[bytes],
        /,
        *,
        ttl: float | None = None,
    ) -> list[bool]:
        return self.manager.commit_batch(reservations, identities, ttl=ttl)

    def abort(self, reservation: Reservation, /) -> None:
        self.manager.abort(reservation)

    def lookup(
        self, keys: Sequence[Key], /, *, deadline: float | None = None, tokens: int = 0
    ) -> Lookup:
        """Answer in this thread when everything is resident, else ask the tiers."""
        name = self.manager.context.tier
        places = [None if n is None else Place(name, n) for n in self.manager.lookup_resident(keys)]
        if None not in places:
            return Lookup(tuple(places))
        late = Lookup(tuple(places), tuple(tier.name for tier in self.manager.tiers))
        work = self.manager.lookup(keys, deadline=deadline, tokens=tokens)
        return self._call(work, deadline, late)

    def load(
        self,
        keys: Sequence[Key],
        owner: object,
        /,
        *,
        deadline: float | None = None,
        tokens: int = 0,
        tenant: str = "",
    ) -> Loaded:
        """Lease in this thread when everything is resident, else bring the rest up."""
        leases = self.manager.lease(keys, owner, tokens=tokens)
        if leases.left == len(keys):
            return Loaded(leases, Reason.COMPLETE)  # type: ignore[arg-type]  # none of them is None
        if self.manager.closed:
            self.manager.release(leases)
            return Loaded((), Reason.CLOSED)
        work = self.manager.complete(
            keys, owner, leases, deadline=deadline, tokens=tokens, tenant=tenant
        )
        late = Loaded((), Reason.DEADLINE)
        return self._call(work, deadline, late, lambda done: self.manager.release(done.leases))

    def delete(self, keys: Sequence[Key], /, *, deadline: float | None = None) -> int:
        """Copies deleted; a tier that cannot be reached is the manager's to remember (an engine wants no error)."""
        with suppress(BackendError):
            return self._call(self.manager.delete(keys, deadline=deadline), deadline, 0)
        return 0

    def invalidate(self, tag: str, /, *, deadline: float | None = None) -> int:
        return self._call(self.manager.invalidate(tag, deadline=deadline), deadline, 0)

    def flush(self, *, deadline: float | None = None) -> Flushed:
        return self._call(self.manager.flush(deadline=deadline), deadline, Flushed())

    def report_prefill(self, tokens: int, seconds: float, /) -> None:
        self.manager.report_prefill(tokens, seconds)

    def call(self, work: Coroutine[Any, Any, T], /) -> T:
        """Run any other coroutine of the manager to its end."""
        return self._call(work, None)

    def close(self, *, deadline: float | None = None) -> Shutdown:
        """Close the manager and end the loop thread; threads that hang stay behind, daemonic."""
        left = self._call(self.manager.aclose(deadline=deadline), None, Shutdown())
        with self._gate:
            if not self._stopped:
                self._stopped = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(GRACE_S)
        return left

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:  # somebody may wait for it
            task.cancel()
        if left:
            _, left = self._loop.run_until_complete(asyncio.wait(left, timeout=GRACE_S))
        if not left:
            self._loop.close()

    def _call(
        self,
        work: Coroutine[Any, Any, T],
        deadline: float | None,
        late: T | None = None,
        undo: Callable[[T], None] = lambda result: None,
    ) -> T:
        """Run ``work`` on the loop; ``late`` is the answer when the loop is too busy to give one, or has ended.

        ``undo`` is called with a result that came after that.
        """
        with self._gate:
            if not self._stopped:
                future = asyncio.run_coroutine_threadsafe(work, self._loop)
            else:
                work.close()
                if late is None:
                    raise Closed("the storage manager is closed")
                return late
        wait = None
        if deadline is not None:
            wait = max(0.0, deadline - self.manager.context.clock.now()) + GRACE_S
        try:
            return future.result(wait)
        except concurrent.futures.TimeoutError:
            if late is None or future.done():
                raise
        except (concurrent.futures.CancelledError, Closed):
            if late is None:
                raise
            return late
        except BaseException:
            future.cancel()
            raise

        def ended(future: concurrent.futures.Future[T]) -> None:
            if not future.cancelled() and future.exception() is None:
                undo(future.result())

        future.add_done_callback(ended)
        return late
