"""The client for coroutines: the same calls, awaited.

Behind each is the blocking call on a thread of a small pool, so that the two surfaces cannot differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from lmcache_core.spi import Refusal
from lmcache_core.storage.results import Loaded
from lmcache_core.wire.client import DaemonClient

P = ParamSpec("P")
R = TypeVar("R")


def _awaited(
    call: Callable[Concatenate[DaemonClient, P], R],
) -> Callable[Concatenate[AsyncDaemonClient, P], Coroutine[Any, Any, R]]:
    """A method of the blocking client as one that is awaited."""

    @wraps(call)
    async def wait(self: AsyncDaemonClient, /, *args: P.args, **kwargs: P.kwargs) -> R:
        work = self.threads.submit(partial(call, self.client, *args, **kwargs))
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            work.add_done_callback(self.give_back)
            raise

    return wait


class AsyncDaemonClient:
    """See the module, and ``DaemonClient`` for what the calls do.

    A call that is cancelled gives back what its answer grants. Deadlines are as there; a call without one has
    the client's timeout from its turn on.

    Args:
        client: closed by ``close``; what exchanges nothing is called there.
        threads: most calls at once; others wait for their turn.
    """

    def __init__(self, client: DaemonClient, /, *, threads: int = 8) -> None:
        self.client = client
        self.release, self.abort = client.release, client.abort
        self.threads = ThreadPoolExecutor(threads, "lmcache-daemon-call")

    lookup = _awaited(DaemonClient.lookup)
    load = _awaited(DaemonClient.load)
    reserve = _awaited(DaemonClient.reserve)
    commit_batch = _awaited(DaemonClient.commit_batch)
    delete = _awaited(DaemonClient.delete)
    invalidate = _awaited(DaemonClient.invalidate)
    flush = _awaited(DaemonClient.flush)
    usage = _awaited(DaemonClient.usage)

    async def close(self) -> None:
        """Part from the daemon once the calls under way are back. Idempotent."""
        await asyncio.to_thread(self.threads.shutdown)
        await asyncio.to_thread(self.client.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def give_back(self, work: Future[Any]) -> None:
        """End what an answer grants that nobody waits for any more."""
        if work.cancelled() or work.exception() is not None:
            return
        answer = work.result()
        if isinstance(answer, Loaded):
            self.release(answer.leases)
        elif isinstance(answer, list):
            for each in answer:
                if not isinstance(each, bool | Refusal):
                    self.abort(each)
