"""Faults on purpose: delays, failures, damage. Innermost, off unless asked for, drawn from the context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lmcache_core.spi import (
    AbstractBackend,
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
    Unavailable,
    Wrapper,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """Probabilities, 0 to 1, per call or per item; all 0 by default.

    Attributes:
        delay: of a call taking up to ``delay_s`` longer.
        fail: of a call failing as a whole, before or after it had its effect.
        fail_item: of an item failing.
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


class Chaos(Wrapper):
    """Answers stay within the laws of a backend; only the bytes may be wrong, and calls slow or failing."""

    config_type = ChaosOptions
    config: ChaosOptions

    def __init__(self, config: ChaosOptions, context: Context, inner: AbstractBackend, /) -> None:
        super().__init__(config, context, inner)
        self.active = True
        """Tests switch the faults off to look at what they left."""

    async def open(self) -> None:
        await super().open()
        # Stored bytes may differ from what was given: nothing may rely on exact versions of values.
        self.capabilities = replace(self.capabilities, quiescence_s=self.capabilities.quiescence_s)

    async def lookup(
        self, keys: Sequence[Key], /, *, deadline: float | None = None
    ) -> Sequence[Found | None]:
        await self._disturb("lookup")
        found = await self.inner.lookup(keys, deadline=deadline)
        return [None if each and self._chance(self.config.lose) else each for each in found]

    async def load(
        self,
        batch: Sequence[Load],
        /,
        *,
        done: LoadDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Loaded]:
        await self._disturb("load")
        results = [
            self._spoil(load, result)
            for load, result in zip(
                batch, await self.inner.load(batch, deadline=deadline), strict=True
            )
        ]
        for index, result in enumerate(results):
            if index:
                await self._pause()
            if done is not None:
                done(index, result)
        return results

    async def store(
        self,
        batch: Sequence[Store],
        /,
        *,
        done: StoreDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Stored]:
        late = self._chance(self.config.fail)
        if not late:
            await self._disturb("store")
        spoilt = [
            replace(item, parts=(self._rotten(item),)) if self._chance(self.config.rot) else item
            for item in batch
        ]
        results = list(await self.inner.store(spoilt, deadline=deadline))
        await self._pause()
        if late:
            raise Unavailable("chaos: the answer to a store was lost", operation="store")
        for index in range(len(results)):
            if self._chance(self.config.fail_item):
                error = Unavailable("chaos: the answer for a value was lost", operation="store")
                results[index] = Stored.failed(error)
            if done is not None:
                done(index, results[index])
        return results

    async def delete(self, keys: Sequence[Key], /) -> int:
        await self._disturb("delete")
        return await self.inner.delete(keys)

    def _chance(self, probability: float) -> bool:
        return self.active and probability > 0 and self.context.random.random() < probability

    async def _pause(self) -> None:
        if self._chance(self.config.delay):
            await self.context.clock.sleep(self.context.random.uniform(0, self.config.delay_s))

    async def _disturb(self, verb: str) -> None:
        await self._pause()
        if self._chance(self.config.fail):
            raise Unavailable(f"chaos: {verb} failed", operation=verb)

    def _spoil(self, load: Load, result: Loaded) -> Loaded:
        if result.status is not LoadStatus.FILLED or not result.nbytes:
            return result
        if self._chance(self.config.fail_item):
            return Loaded.failed(Unavailable("chaos: a load failed", operation="load"))
        if self._chance(self.config.flip):
            at = self.context.random.randrange(result.nbytes)
            for view in load.into:
                if at < view.nbytes:
                    view[at] ^= 1 << self.context.random.randrange(8)
                    break
                at -= view.nbytes
        if self._chance(self.config.tear) and len(load.into) == 1:
            at = self.context.random.randrange(result.nbytes)
            load.into[0][at : result.nbytes] = bytes(result.nbytes - at)
        return result

    def _rotten(self, item: Store) -> memoryview:
        copy = bytearray(b"".join(item.parts))
        if copy:
            copy[self.context.random.randrange(len(copy))] ^= 1 << self.context.random.randrange(8)
        return memoryview(copy)
