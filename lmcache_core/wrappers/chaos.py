"""Faults on purpose: delays, failures, damage. Innermost, off unless asked for, drawn from the context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmcache_core.spi import AbstractBackend, Context, Load, LoadStatus, Store, Unavailable
from lmcache_core.wrappers.around import Around, Call, Done, failed


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """Probabilities, 0 to 1, per call or per item; all 0 by default.

    Attributes:
        delay: of a call taking up to ``delay_s`` longer.
        fail: of a call failing as a whole, before or after it had its effect.
        fail_item: of an item failing, before or after it had its effect.
        flip: of one flipped bit in a value that is loaded.
        tear: of the end of a value that is loaded being zeros.
        rot: of one flipped bit in a value as it is stored.
        lose: of a value that is there being missed.
    """

    delay: float = 0.0
    delay_s: float = 0.0
    fail: float = 0.0
    fail_item: float = 0.0
    flip: float = 0.0
    tear: float = 0.0
    rot: float = 0.0
    lose: float = 0.0


class Chaos(Around):
    """Answers stay within the laws of a backend; only the bytes may be wrong, and calls slow or failing.

    Attributes:
        active: False makes it a plain passage, for looking at what the faults left.
        hit: faults that met something, by the name of their option.
    """

    config_type = ChaosOptions
    config: ChaosOptions

    def __init__(self, config: ChaosOptions, context: Context, inner: AbstractBackend, /) -> None:
        super().__init__(config, context, inner)
        self.active = True
        self.hit: Counter[str] = Counter()

    async def around(
        self,
        verb: str,
        batch: Sequence[Any],
        call: Call,
        done: Done | None,
        deadline: float | None,
        /,
    ) -> Any:
        await self._pause()
        failing, lost = self._chance(self.config.fail), self._chance(0.5)
        self.hit["fail"] += failing and len(batch) > 0
        if failing and not lost:
            raise Unavailable(f"chaos: {verb} failed", operation=verb)
        if verb == "store":
            batch = [
                self._rotten(item) if self._chance(self.config.rot) else item for item in batch
            ]
        given = [n for n in range(len(batch)) if verb in ("lookup", "delete") or not self._fails()]
        results = await call([batch[n] for n in given], None)
        if failing:
            raise Unavailable(f"chaos: the answer to a {verb} was lost", operation=verb)
        if verb == "delete":
            return results
        if verb == "lookup":
            return [None if each and self._lost() else each for each in results]
        came = dict(zip(given, results, strict=True))
        results = []
        for index, item in enumerate(batch):
            if index:
                await self._pause()
            result = came.get(index)
            if verb == "load" and result is not None and result.status is LoadStatus.FILLED:
                self._spoil(item, result.nbytes)
            if result is None or self._fails():
                result = failed(verb, Unavailable(f"chaos: a {verb} failed", operation=verb))
            results.append(result)
            if done is not None:
                done(index, result)
        return results

    def _fails(self) -> bool:
        fails = self._chance(self.config.fail_item / 2)
        self.hit["fail_item"] += fails
        return fails

    def _chance(self, probability: float) -> bool:
        return self.active and probability > 0 and self.context.random.random() < probability

    def _lost(self) -> bool:
        lost = self._chance(self.config.lose)
        self.hit["lose"] += lost
        return lost

    async def _pause(self) -> None:
        if self._chance(self.config.delay):
            await self.context.clock.sleep(self.context.random.uniform(0, self.config.delay_s))

    def _spoil(self, load: Load, nbytes: int) -> None:
        whole = load.into[0][:nbytes]
        if whole.nbytes and self._chance(self.config.flip):
            at = self.context.random.randrange(whole.nbytes)
            whole[at] ^= 1 << self.context.random.randrange(8)
            self.hit["flip"] += 1
        if whole.nbytes and self._chance(self.config.tear):
            at = self.context.random.randrange(whole.nbytes)
            self.hit["tear"] += any(whole[at:])
            whole[at:] = bytes(whole.nbytes - at)

    def _rotten(self, item: Store) -> Store:
        copy = bytearray(b"".join(item.parts))
        if copy:
            copy[self.context.random.randrange(len(copy))] ^= 1 << self.context.random.randrange(8)
            self.hit["rot"] += 1
        return replace(item, parts=(memoryview(copy),))
