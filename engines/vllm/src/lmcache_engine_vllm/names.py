"""Digest and root of an engine's key space, as the daemon has them from all of its ranks."""

from __future__ import annotations

import hashlib
import os
import time

from lmcache_core.spi.errors import BackendError, ConfigError
from lmcache_core.wire import records, replies
from lmcache_core.wire.client import DaemonClient
from lmcache_engine_vllm.breaker import Breaker
from lmcache_engine_vllm.settings import LOG

AGAIN = 0.25
EPOCH_TAG = b"lmcache.epoch\x00"


class Names:
    """Only ranks know their memory, and so what names it; the scheduler asks the daemon.

    Args:
        chunk: tokens of one, until the ranks have said otherwise: where a daemon came up, or was another one,
            between their start and the scheduler's, the halves may have been told different sizes.

    Attributes:
        space, root: empty until all ranks of the engine are there.
    """

    def __init__(
        self, client: DaemonClient, engine: str, ranks: int, breaker: Breaker, chunk: int
    ) -> None:
        self.space = self.root = b""
        self.chunk = chunk
        self._client = client
        self._engine = engine
        self._ranks = ranks
        self._breaker = breaker
        self._boot = self._epoch = b""
        self._next_try = 0.0

    def ready(self) -> bool:
        """Whether requests can be named; asks once per life of the daemon."""
        home = self._client.home
        if home is None or home.boot == self._boot:
            return bool(self.root)
        if time.monotonic() < self._next_try or not self._breaker.closed:
            return False
        self.root = self.space = b""
        told = None
        try:
            with self._breaker.watch(self._client):
                told = self._client.ask(
                    replies.Registered,
                    lambda id: records.Register(id, self._engine, -1, self._ranks),
                    self._breaker.deadline(),
                )
        except (BackendError, ConfigError) as error:
            LOG.warning("no key space from the daemon: %s", error)
        if told is None or not told.root:
            self._next_try = time.monotonic() + AGAIN
            return False
        self._boot, self.space, self.root = home.boot, told.space, told.root
        if told.chunk and told.chunk != self.chunk:
            LOG.warning(
                "the ranks of this engine keep chunks of %d tokens, not %d: they met another daemon, or none, "
                "when they started; start the engine again to share with others",
                told.chunk, self.chunk,
            )  # fmt: skip
            self.chunk = told.chunk
        if self._epoch:
            self.root = hashlib.sha256(EPOCH_TAG + told.root + self._epoch).digest()
        return True

    def renew(self) -> None:
        """The weights have changed: nothing is found any more under the names so far."""
        self._epoch = os.urandom(16)
        self._boot = self.space = self.root = b""
