"""Counts what a tier is asked, what it answers and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmcache_core.observers import Metrics
from lmcache_core.spi import BackendError, BatchDone
from lmcache_core.wrappers.around import Around, Call, Done

REASONS = ("full", "too large", "read-only")
"""Refusals with a label of their own; all others are ``other``."""
GOOD = ("filled", "stored", "present")


class Measured(Around):
    """Outermost: one ``BatchDone`` and the counters of ``lmcache_core.observers`` per call.

    A call that is cancelled counts its items as failed, so that asked is always answered.
    Configured with the ``Metrics`` to count in.
    """

    config_type = Metrics
    config: Metrics

    async def around(
        self,
        verb: str,
        batch: Sequence[Any],
        call: Call,
        done: Done | None,
        deadline: float | None,
        /,
    ) -> Any:
        asked = len(batch)
        if verb in ("load", "store"):
            self._add(f"{verb}s_asked_total", asked)
        begun = self.context.clock.now()
        good = missed = nbytes = 0
        trouble = "cancelled"
        try:
            result = await call(batch, done)
            trouble = ""
            if verb == "delete":
                good, missed = result, asked - result
            elif verb == "lookup":
                good = sum(each is not None for each in result)
                missed = asked - good
            else:
                good, missed, nbytes = self._judge(verb, batch, result)
            return result
        except BackendError as error:
            trouble = type(error).__name__
            raise
        finally:
            tier, seconds = self.context.tier, self.context.clock.now() - begun
            if trouble:
                if verb in ("load", "store"):
                    self._add(f"{verb}s_total", asked, outcome="failed")
                self._add("failures_total", asked, verb=verb, reason=trouble)
            self.config.observe("lmcache_tier_verb_seconds", seconds, tier=tier, verb=verb)
            self.context.emit(
                BatchDone(
                    tier=tier, verb=verb, asked=asked, good=good, missed=missed,
                    failed=asked - good - missed, nbytes=nbytes, seconds=seconds,
                )
            )  # fmt: skip

    def _judge(
        self, verb: str, batch: Sequence[Any], results: Sequence[Any]
    ) -> tuple[int, int, int]:
        good = missed = nbytes = 0
        for item, result in zip(batch, results, strict=True):
            outcome = result.status.value
            self._add(f"{verb}s_total", 1, outcome=outcome)
            good += outcome in GOOD
            missed += outcome in ("missed", "refused")
            if outcome in ("filled", "stored"):
                nbytes += result.nbytes if verb == "load" else item.nbytes
            if outcome == "refused":
                reason = next((name for name in REASONS if result.reason.startswith(name)), "other")
                self._add("refusals_total", 1, reason=reason)
            if result.error is not None:
                self._add("failures_total", 1, verb=verb, reason=type(result.error).__name__)
        self._add(f"{'read' if verb == 'load' else 'written'}_bytes_total", nbytes)
        return good, missed, nbytes

    def _add(self, what: str, value: int, **labels: str) -> None:
        if value:
            self.config.add(f"lmcache_tier_{what}", value, tier=self.context.tier, **labels)
