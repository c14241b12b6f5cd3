"""The one place that touches the daemon's client: its answers as those of a backend."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lmcache_backend_lmcache.config import LMCacheConfig
from lmcache_core import frame, ops
from lmcache_core.spi import (
    MISSED,
    PRESENT,
    STORED,
    Corrupt,
    Found,
    Key,
    Load,
    Loaded,
    Refusal,
    ScanPage,
    Store,
    Stored,
    Unavailable,
    Usage,
    fill,
)
from lmcache_core.storage.results import Reason
from lmcache_core.wire import records, replies
from lmcache_core.wire.client import DaemonClient
from lmcache_core.wire.codec import to_runs

NOTHING_THERE = (Reason.MISS, Reason.COMPLETE)


class Client:
    """Blocking verbs on one daemon; thread-safe.

    Raises:
        ConfigError: the address is none.
        Unavailable: nobody answers there (from the verbs as well).
    """

    def __init__(self, config: LMCacheConfig, name: str) -> None:
        self._url = config.url
        self._daemon = DaemonClient(
            config.url, token=config.token.reveal(), timeout=config.timeout, name=name
        )
        if self._daemon.home is None:
            self._daemon.close()
            raise self._absent()

    @property
    def local(self) -> bool:
        """Whether values are read in place, so that a part costs a part."""
        home = self._daemon.home
        return home is not None and bool(home.sizes)

    def close(self) -> None:
        self._daemon.close()

    def find(self, keys: Sequence[Key]) -> list[Found | None]:
        runs = to_runs(keys)
        found = self._daemon.ask(replies.Found, lambda id: records.Find(id, runs, 60.0))
        pairs = zip(found.where, found.nbytes, strict=True)
        return [Found(nbytes, promise=False) if at >= 0 else None for at, nbytes in pairs]

    def load(self, load: Load) -> Loaded:
        loaded = self._daemon.load([load.key], self)
        if not loaded.leases:
            if loaded.reason in NOTHING_THERE:
                return MISSED
            raise Unavailable(f"{self._url} has no answer: {loaded.reason.value}")
        try:
            (lease,) = loaded.leases
            return fill(load, lease.view, ops.copy)
        finally:
            self._daemon.release(loaded.leases)

    def store(self, store: Store) -> Stored:
        (held,) = self._daemon.reserve([(store.key, store.nbytes)], self)
        if isinstance(held, Refusal):
            if held is Refusal.PRESENT:
                return PRESENT
            if held is Refusal.UNWANTED and self._daemon.home is None:
                raise self._absent()
            return Stored.refused(held.value)
        try:
            at = 0
            for part in store.parts:
                ops.copy(held.view[at : at + part.nbytes], part)
                at += part.nbytes
            identity = _identity(held.view, store.key)
            (visible,) = self._daemon.commit_batch([held], [identity], ttl=store.ttl)
            if not visible:
                raise Unavailable(f"{self._url} has not confirmed the value")
            return STORED
        finally:
            self._daemon.abort(held)

    def delete(self, keys: Sequence[Key]) -> int:
        runs = to_runs(keys)
        return self._daemon.ask(replies.Count, lambda id: records.Delete(id, runs, 60.0)).count

    def scan(self, after: str | None, limit: int) -> ScanPage:
        page = self._daemon.ask(
            replies.Values, lambda id: records.List(id, after=after, limit=min(limit, 10_000))
        )
        pairs = zip(page.keys, page.nbytes, strict=True)
        return ScanPage([(Key.parse(k), Found(n, promise=False)) for k, n in pairs], page.after)

    def usage(self) -> Usage:
        document = self._daemon.ask(replies.Document, records.Describe)
        memory = json.loads(document.json)["memory"]
        return Usage(memory["capacity"] - memory["free"], memory["values"], memory["capacity"])

    def _absent(self) -> Unavailable:
        return Unavailable(f"no daemon answers at {self._url}")


def _identity(value: memoryview, key: Key) -> bytes:
    """Of a frame its own, which is what the daemon and its other clients compare; of anything else a digest."""
    try:
        return frame.open_header(value, key).identity
    except Corrupt:
        return ops.digest(value, 0)
