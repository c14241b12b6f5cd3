"""Third part of the storage manager: what operators ask for. Serving goes on meanwhile.

Values are invisible before their deletion begins; then all tiers remove at once. When one of
them cannot, or not in time, the others are finished first and its ``BackendError`` is raised then: until the
verb is repeated with success, that tier may still have some of the values.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from lmcache_core import frame
from lmcache_core.spi import (
    BackendError,
    ConfigError,
    Corrupt,
    DeadlineExceeded,
    Key,
    Load,
    LoadStatus,
    Unavailable,
    Unsupported,
)
from lmcache_core.storage import upkeep
from lmcache_core.storage.gate import Gate
from lmcache_core.storage.results import Listing, Shutdown
from lmcache_core.storage.serving import Serving
from lmcache_core.storage.storing import store
from lmcache_core.storage.tasks import settle
from lmcache_core.storage.tier import Tier
from lmcache_core.storage.writing import BATCH, Parcel
from lmcache_core.wrappers import Ladder

PAGE = 1000
OPEN_WAIT_S = 5.0
"""How long opening waits for a store that does not answer; it is tried again in the background."""
Work = tuple[Tier, Coroutine[Any, Any, int]]


class Administration(Serving):
    """Verbs on sets of values and on tiers. Counts are copies: a value in two tiers counts twice."""

    async def delete(
        self, keys: Sequence[Key], /, *, tier: str | None = None, deadline: float | None = None
    ) -> int:
        """Forget values, in one tier or everywhere; leases already given stay good."""
        self._open()
        keys, count = builtins.list(dict.fromkeys(keys)), 0
        if tier is None:
            self.writing.forget(keys)
            self.loader.doom(keys)
        if tier in (None, self.context.tier):
            count += self.pool.drop(keys)
        work: builtins.list[Work] = []
        for each in self._named(tier):
            each.storing.update((key, True) for key in keys if key in each.storing)
            hidden = upkeep.hide(each, keys, "deleted")
            work.append((each, _remove(each, keys, hidden, deadline)))
        return count + await _all(work, deadline)

    async def clear(
        self,
        wanted: Callable[[Key], bool] = lambda key: True,
        /,
        *,
        tier: str | None = None,
        deadline: float | None = None,
    ) -> int:
        """Forget the values ``wanted``. Shared stores are searched page by page where they can be listed."""
        self._open()
        count = 0
        after: int | None = 0
        if tier in (None, self.context.tier):
            self.loader.doom([key for key in self.loader.flights if wanted(key)])
            while after is not None:
                page, after = self.pool.scan(after, PAGE)
                keys = [key for key, _ in page if wanted(key)]
                self.writing.forget(keys)
                count += self.pool.drop(keys)
                await asyncio.sleep(0)  # a long list must not hold up the loop
        work: builtins.list[Work] = []
        for each in self._named(tier):
            each.storing.update((key, True) for key in each.storing if wanted(key))
            if each.holdings is None or not each.complete.is_set():
                work.append((each, _search(each, deadline, wanted=wanted)))
                continue
            after, index = 0, each.holdings.index
            while after is not None:
                slots, after = index.page(after, PAGE)
                found = [key for key in map(index.key, slots) if wanted(key)]
                count += len(upkeep.hide(each, found, "deleted"))
                await asyncio.sleep(0)
            work.append((each, _swept(each, wanted, deadline)))
        return count + await _all(work, deadline)

    async def invalidate(self, tag: str, /, *, deadline: float | None = None) -> int:
        """Delete every value stored under a tag, by this process or an earlier one.

        Indexes know the tags of what this process stored; for the rest headers in the stores are read.
        What is being written under the tag right now will not become visible.
        """
        self._open()
        self._banned.update(key for key, tags in builtins.list(self._tags.items()) if tag in tags)
        keys = self.writing.tagged(tag)
        self.loader.doom(builtins.list(self.loader.flights))  # their tags are known when they land
        count = self.pool.drop_tag(tag)
        work: builtins.list[Work] = []
        for tier in self.tiers:
            if tier.holdings is not None:
                keys.update(map(tier.holdings.index.key, tier.holdings.index.tagged(tag)))
            if tier.holdings is None or tier.recovered:
                work.append((tier, _search(tier, deadline, tag=tag)))
        try:
            count += await self.delete(builtins.list(keys), deadline=deadline)
        finally:
            count += await _all(work, deadline)
        return count

    async def list(
        self,
        tier: str,
        /,
        *,
        space: bytes | None = None,
        after: str | None = None,
        limit: int = 1000,
    ) -> Listing:
        """Name values of one tier, optionally of one key space; a value that stays is listed once."""
        self._open()
        if tier == self.context.tier:
            values, then = self.pool.scan(int(after or 0), limit)
            page = ((key, nbytes) for key, nbytes in values if space in (None, key.space))
            return Listing(tuple(page), None if then is None else str(then))
        found = self.tier(tier)
        if found.holdings is not None:
            index = found.holdings.index
            slots, then = index.page(int(after or 0), limit, space=space)
            page = ((index.key(slot), index.nbytes[slot]) for slot in slots)
            return Listing(tuple(page), None if then is None else str(then))
        try:
            answer = await found.call("scan", found.backend.scan(after, limit=limit), None)
        except BackendError as error:
            found.context.log.warning("tier %s cannot be listed: %s", tier, error)
            return Listing((), None)
        page = ((key, each.nbytes) for key, each in answer.values if space in (None, key.space))
        return Listing(tuple(page), answer.after)

    async def copy(
        self, keys: Sequence[Key], source: str, target: str, /, *, deadline: float | None = None
    ) -> builtins.list[Key]:
        """Copy values between two tiers, through resident memory; names those the target has afterwards."""
        self._open()
        into = None if target == self.context.tier else self.tier(target)
        arrived: builtins.list[Key] = []
        for start in range(0, len(keys), BATCH):
            for key in await self._of(source, keys[start : start + BATCH], deadline):
                loaded = await self.load([key], self, deadline=deadline)
                if loaded.leases and into is not None:
                    parcel = Parcel(loaded.leases[0].extent.nbytes, "", 1.0)
                    await store(into, self.pool, {key: parcel}, self, deadline=deadline)
                    found, _ = await into.find([key], deadline)
                    arrived += [key] if found[0] is not None else []
                elif loaded.leases:
                    arrived.append(key)
                self.pool.release(loaded.leases)
        return arrived

    async def move(
        self, keys: Sequence[Key], source: str, target: str, /, *, deadline: float | None = None
    ) -> builtins.list[Key]:
        """``copy``, then forget in the source what has arrived."""
        arrived = await self.copy(keys, source, target, deadline=deadline)
        await self.delete(arrived, tier=source, deadline=deadline)
        return arrived

    async def add_tier(self, tier: Tier, /, *, position: int | None = None) -> None:
        """Open a tier and serve from it; ``position`` counts from the first lower tier, default last.

        Raises:
            ConfigError: its name is taken, or its configuration cannot work here.
        """
        self._open()
        if tier.name in (self.context.tier, *(each.name for each in self.tiers)):
            raise ConfigError(f"there is a tier {tier.name!r} already; give this one another name")
        await self._admit(tier)
        self.tiers.insert(len(self.tiers) if position is None else position, tier)

    async def remove_tier(self, name: str, /, *, deadline: float | None = None) -> Shutdown:
        """Stop serving from a tier, write what it still wants, and close it."""
        self._open()
        tier = self.tier(name)
        if (writer := self.writing.writers.get(tier)) is not None:
            await writer.drained(self._left(deadline)())
        self.tiers.remove(tier)
        until = deadline or self.context.clock.now() + self.config.manager.close_timeout
        parked, trouble = await tier.close(until)
        self.writing.detach(tier)
        if self.feed is not None:
            self.feed.emptied(name)
        self._removed.append(tier)
        return Shutdown({name: parked} if parked else {}, 0, {name: trouble} if trouble else {})

    async def set_limit(self, name: str, nbytes: int, /) -> None:
        """Change a tier's byte limit; a smaller one evicts at once.

        Raises:
            ConfigError: no such tier, or it has no limit of ours.
        """
        self._open()
        tier = self.tier(name)
        if tier.holdings is None:
            raise ConfigError(f"tier {name!r} is shared: its limit is set at the store")
        tier.set_limit(nbytes)
        now = self.context.clock.now()
        await upkeep.shrink(tier, now + tier.config.deadline * upkeep.PATIENCE)

    def tier(self, name: str, /) -> Tier:
        """A lower tier by name.

        Raises:
            ConfigError: there is none.
        """
        for tier in self.tiers:
            if tier.name == name:
                return tier
        known = ", ".join(tier.name for tier in self.tiers) or "none"
        raise ConfigError(f"there is no lower tier {name!r}; there are: {known}")

    def _named(self, name: str | None) -> Iterator[Tier]:
        return (tier for tier in self.tiers if name in (None, tier.name))

    async def _of(
        self, name: str, keys: Sequence[Key], deadline: float | None
    ) -> builtins.list[Key]:
        """Those values that a tier has."""
        if name == self.context.tier:
            there: Sequence[object] = self.pool.lengths(keys)
        else:
            there, _ = await self.tier(name).find(keys, deadline)
        return [key for key, each in zip(keys, there, strict=True) if each is not None]

    async def _admit(self, tier: Tier) -> None:
        tier.metrics = self.metrics
        tier.gate = Gate(self.prefill, self.context.random, enabled=self.config.manager.cost_gate)
        if isinstance(tier.codec, Ladder):
            tokens = self.config.engine.chunk_size
            tier.codec.computing = lambda chunks: self.prefill.seconds(chunks * tokens)
        tier.quarantine.limit = int(self.pool.capacity * self.config.manager.quarantine)
        if self.feed is not None:
            tier.watch = self.feed.watch(tier.name)
        await tier.open(OPEN_WAIT_S)
        self.writing.attach(tier)


async def _remove(
    tier: Tier, keys: Sequence[Key], hidden: Sequence[Key], deadline: float | None
) -> int:
    """Delete what was hidden; where nobody knows yet what is there, everything asked for."""
    if tier.holdings is not None and tier.complete.is_set():
        return len(hidden) + await _swept(tier, {*keys}.__contains__, deadline)
    count = await upkeep.remove(tier, keys, deadline) if keys else 0
    if count is None:
        raise Unavailable(f"tier {tier.name} may still have {len(keys)} values to be deleted")
    return count


async def _swept(tier: Tier, wanted: Callable[[Key], bool], deadline: float | None) -> int:
    """Remove what was hidden and counted.

    Raises:
        Unavailable: not all of it; it stays invisible, until a restart, and is tried again with what comes next.
    """
    if left := sum(map(wanted, await upkeep.sweep(tier, deadline))):
        raise Unavailable(f"tier {tier.name} may still have {left} values to be deleted")
    return 0


async def _search(
    tier: Tier,
    deadline: float | None,
    *,
    wanted: Callable[[Key], bool] | None = None,
    tag: str = "",
) -> int:
    """Delete values that a store holds and no index knows enough of: those ``wanted``, or under a tag."""
    if not tier.opened:
        raise Unavailable(f"tier {tier.name} is not open yet; what it has may stay there")
    if not tier.backend.capabilities.scan:
        raise Unsupported(f"tier {tier.name} cannot be searched; what it has may stay there")
    count, after = 0, None
    while True:
        page = await tier.call("scan", tier.backend.scan(after, limit=PAGE), deadline)
        keys = [key for key, _ in page.values]
        if wanted is not None:
            keys = [key for key in keys if wanted(key)]
        else:
            keys = [key for key in keys if tag in await _tags(tier, key, deadline)]
        upkeep.hide(tier, keys, "deleted")
        count += await _remove(tier, keys, keys, deadline)
        after = page.after
        if after is None:
            return count


async def _tags(tier: Tier, key: Key, deadline: float | None) -> Sequence[str]:
    """Labels of a stored value, from its header; none where it is damaged or gone."""
    if tier.codec is not None:
        reading = tier.codec.headers([key], deadline)
        (header,) = await tier.call("load", reading, deadline, patience=upkeep.PATIENCE)
        if isinstance(header, frame.Header):
            return header.tags
        if header.error is None or isinstance(header.error, Corrupt):
            return ()
        raise header.error
    found = (await tier.find([key], deadline))[0][0]
    if tier.backend.capabilities.ranges:
        lengths = [frame.ALIGNMENT]
    else:
        lengths = [found.nbytes] if found is not None else []
    for nbytes in lengths:
        part = nbytes if tier.backend.capabilities.ranges else None
        load = Load(key, (memoryview(bytearray(nbytes)),), 0, part)
        work = tier.backend.load([load])
        result = (await tier.call("load", work, deadline, patience=upkeep.PATIENCE))[0]
        if result.status is LoadStatus.MISSED or isinstance(result.error, Corrupt):
            return ()
        if result.error is not None:
            raise result.error
        needed = frame.length_of(load.into[0])
        if needed > nbytes and len(lengths) < 2:
            lengths.append(needed)
    try:
        return frame.open_header(load.into[0], key).tags if lengths else ()
    except Corrupt:
        return ()


async def _all(work: Sequence[Work], deadline: float | None) -> int:
    """Run one job per tier, all at once.

    Raises:
        BackendError: of the first tier that could not, after all others are done; or one is late.
    """
    tasks = [(tier, tier.tasks.start("removal", job)) for tier, job in work]
    count, errors = 0, list[BackendError]()
    for tier, task in tasks:
        seconds = None if deadline is None else deadline - tier.context.clock.now()
        if not await settle(task, seconds) or task.cancelled():
            errors.append(DeadlineExceeded(f"tier {tier.name} is still removing values"))
        elif isinstance(error := task.exception(), BackendError):
            errors.append(error)
        else:
            count += task.result()
    if errors:
        raise errors[0]
    return count
