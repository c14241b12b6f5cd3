"""Counts what a tier is asked, what it answers and how long it takes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from lmcache_core.observers import Metrics
from lmcache_core.spi import (
    AbstractBackend,
    BackendError,
    BatchDone,
    Context,
    Found,
    Key,
    Load,
    LoadDone,
    Loaded,
    LoadStatus,
    Store,
    Stored,
    StoreDone,
    StoreStatus,
    Wrapper,
)

T = TypeVar("T")
REASONS = ("full", "too large", "read-only")
"""Refusals with a label of their own; all others are ``other``."""


class Measured(Wrapper):
    """Outermost: one ``BatchDone`` and the counters of ``lmcache_core.observers`` per call.

    A call that is cancelled counts its items as failed, so that asked is always answered.
    """

    config_type = Metrics
    config: Metrics

    def __init__(self, config: Metrics, context: Context, inner: AbstractBackend, /) -> None:
        super().__init__(config, context, inner)

    async def lookup(
        self, keys: Sequence[Key], /, *, deadline: float | None = None
    ) -> Sequence[Found | None]:
        found = await self._time(
            "lookup", len(keys), lambda: self.inner.lookup(keys, deadline=deadline), self._looked
        )
        return found

    async def load(
        self,
        batch: Sequence[Load],
        /,
        *,
        done: LoadDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Loaded]:
        self._add("loads_asked_total", len(batch))
        return await self._time(
            "load",
            len(batch),
            lambda: self.inner.load(batch, done=done, deadline=deadline),
            self._loaded,
        )

    async def store(
        self,
        batch: Sequence[Store],
        /,
        *,
        done: StoreDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Stored]:
        self._add("stores_asked_total", len(batch))
        sizes = [item.nbytes for item in batch]
        return await self._time(
            "store",
            len(batch),
            lambda: self.inner.store(batch, done=done, deadline=deadline),
            lambda results: self._stored(results, sizes),
        )

    async def delete(self, keys: Sequence[Key], /) -> int:
        return await self._time(
            "delete",
            len(keys),
            lambda: self.inner.delete(keys),
            lambda count: (count, len(keys) - count, 0),
        )

    async def _time(
        self,
        verb: str,
        asked: int,
        call: Callable[[], Awaitable[T]],
        judge: Callable[[Any], tuple[int, int, int]],
    ) -> T:
        begun = self.context.clock.now()
        good, missed, nbytes = 0, 0, 0
        reason = "cancelled"
        try:
            result = await call()
            good, missed, nbytes = judge(result)
            reason = ""
            return result
        except BackendError as error:
            reason = type(error).__name__
            raise
        finally:
            if reason:
                outcomes = {"load": "loads_total", "store": "stores_total"}
                if verb in outcomes:
                    self._add(outcomes[verb], asked, outcome="failed")
                self._add("failures_total", asked, verb=verb, reason=reason)
            seconds = self.context.clock.now() - begun
            tier = self.context.tier
            self.config.observe("lmcache_tier_verb_seconds", seconds, tier=tier, verb=verb)
            self.context.emit(
                BatchDone(
                    tier=tier, verb=verb, asked=asked, good=good, missed=missed,
                    failed=asked - good - missed, nbytes=nbytes, seconds=seconds,
                )
            )  # fmt: skip

    def _looked(self, found: Sequence[Found | None]) -> tuple[int, int, int]:
        hits = [each for each in found if each is not None]
        return len(hits), len(found) - len(hits), sum(each.nbytes for each in hits)

    def _loaded(self, results: Sequence[Loaded]) -> tuple[int, int, int]:
        nbytes = sum(each.nbytes for each in results)
        good = sum(each.status is LoadStatus.FILLED for each in results)
        missed = sum(each.status is LoadStatus.MISSED for each in results)
        for status in LoadStatus:
            count = sum(each.status is status for each in results)
            self._add("loads_total", count, outcome=status.value)
        self._fail("load", results)
        self._add("read_bytes_total", nbytes)
        return good, missed, nbytes

    def _stored(self, results: Sequence[Stored], sizes: Sequence[int]) -> tuple[int, int, int]:
        nbytes = good = refused = 0
        for each, size in zip(results, sizes, strict=True):
            self._add("stores_total", 1, outcome=each.status.value)
            if each.status is StoreStatus.STORED:
                nbytes += size
            if each.status in (StoreStatus.STORED, StoreStatus.PRESENT):
                good += 1
            elif each.status is StoreStatus.REFUSED:
                refused += 1
                reason = next((name for name in REASONS if each.reason.startswith(name)), "other")
                self._add("refusals_total", 1, reason=reason)
        self._fail("store", results)
        self._add("written_bytes_total", nbytes)
        return good, refused, nbytes

    def _fail(self, verb: str, results: Sequence[Loaded | Stored]) -> None:
        for each in results:
            if each.error is not None:
                self._add("failures_total", 1, verb=verb, reason=type(each.error).__name__)

    def _add(self, what: str, value: int, **labels: str) -> None:
        if value:
            self.config.add(f"lmcache_tier_{what}", value, tier=self.context.tier, **labels)
