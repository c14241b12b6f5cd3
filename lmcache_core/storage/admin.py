"""What operators ask for: delete, clear, list, copy, invalidate. Serving goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_core import frame
from lmcache_core.spi import BackendError, Corrupt, Key, Load, LoadStatus
from lmcache_core.storage import upkeep
from lmcache_core.storage.results import Listing
from lmcache_core.storage.storing import store
from lmcache_core.storage.tasks import settle
from lmcache_core.storage.writing import BATCH, Parcel

if TYPE_CHECKING:
    from lmcache_core.storage.manager import StorageManager
    from lmcache_core.storage.tier import Tier

PAGE = 1000
HEADERS = 64
"""Headers read at once when a store is searched for a tag."""


async def delete(
    manager: StorageManager,
    keys: Sequence[Key],
    deadline: float | None,
    /,
    *,
    only: str | None = None,
) -> int:
    """Invisible first, everywhere; then removed, all tiers at once."""
    keys = list(dict.fromkeys(keys))
    count = 0
    if only is None:
        manager.writing.forget(keys)
        manager.loader.doom(keys)
    if only in (None, manager.context.tier):
        count += manager.pool.drop(keys)
    work = []
    for tier in manager.tiers:
        if only in (None, tier.name):
            tier.storing.update((key, True) for key in keys if key in tier.storing)
            hidden = upkeep.hide(tier, keys, "deleted")
            work.append((tier, _remove(tier, keys, hidden, deadline)))
    return count + await _all(work, deadline)


async def clear(
    manager: StorageManager,
    wanted: Callable[[Key], bool],
    only: str | None,
    deadline: float | None,
    /,
) -> int:
    """Forget what is ``wanted``. Shared stores are searched page by page where they can be listed."""
    count = 0
    if only in (None, manager.context.tier):
        keys = [key for key in _resident(manager) if wanted(key)]
        manager.writing.forget(keys)
        manager.loader.doom([key for key in manager.loader.flights if wanted(key)])
        count += manager.pool.drop(keys)
    work = []
    for tier in manager.tiers:
        if only not in (None, tier.name):
            continue
        tier.storing.update((key, True) for key in tier.storing if wanted(key))
        if tier.holdings is not None and tier.complete.is_set():
            index = tier.holdings.index
            hidden = upkeep.hide(
                tier, [k for k in map(index.key, index.slots()) if wanted(k)], "deleted"
            )
            work.append((tier, _remove(tier, hidden, hidden, deadline)))
        else:
            work.append((tier, _search(tier, wanted, deadline)))
    return count + await _all(work, deadline)


async def invalidate(manager: StorageManager, tag: str, deadline: float | None, /) -> int:
    """Delete by tag: from the indexes, and where those do not know it, from the headers in the store."""
    keys = manager.writing.tagged(tag)
    manager.loader.doom(list(manager.loader.flights))  # their tags are known only when they land
    count = manager.pool.drop_tag(tag)
    work = []
    for tier in manager.tiers:
        if tier.holdings is not None:
            index = tier.holdings.index
            keys.update(map(index.key, index.tagged(tag)))
        if tier.holdings is None or tier.recovered:
            work.append((tier, _search(tier, None, deadline, tag=tag)))
    return count + await delete(manager, list(keys), deadline) + await _all(work, deadline)


async def listing(
    manager: StorageManager, name: str, space: bytes | None, after: str | None, limit: int, /
) -> Listing:
    """One page. The place to go on is a slot number, or what a shared store said."""
    if name == manager.context.tier:
        values, then = manager.pool.scan(int(after or 0), limit)
        if space is not None:
            values = [(key, nbytes) for key, nbytes in values if key.space == space]
        return Listing(tuple(values), None if then is None else str(then))
    tier = manager.tier(name)
    if tier.holdings is not None:
        index = tier.holdings.index
        slots, then = index.page(int(after or 0), limit, space=space)
        return Listing(
            tuple((index.key(slot), index.nbytes[slot]) for slot in slots),
            None if then is None else str(then),
        )
    try:
        page = await tier.call("scan", tier.backend.scan(after, limit=limit), None)
    except BackendError as error:
        tier.context.log.warning("tier %s cannot be listed: %s", name, error)
        return Listing((), None)
    found = ((key, each.nbytes) for key, each in page.values if space in (None, key.space))
    return Listing(tuple(found), page.after)


async def copy(
    manager: StorageManager,
    keys: Sequence[Key],
    source: str,
    target: str,
    deadline: float | None,
    /,
) -> list[Key]:
    """Copy batch by batch through resident memory; returns what the target has afterwards."""
    resident = manager.context.tier
    into = None if target == resident else manager.tier(target)
    arrived: list[Key] = []
    for start in range(0, len(keys), BATCH):
        batch = keys[start : start + BATCH]
        if source == resident:
            there = [
                k for k, n in zip(batch, manager.pool.lengths(batch), strict=True) if n is not None
            ]
        else:
            found, _ = await manager.tier(source).find(batch, deadline)
            there = [key for key, each in zip(batch, found, strict=True) if each is not None]
        for key in there:
            loaded = await manager.load([key], manager, deadline=deadline)
            if loaded.leases and into is not None:
                nbytes = loaded.leases[0].extent.nbytes
                await store(
                    into, manager.pool, {key: Parcel(nbytes, "", 1.0)}, manager, deadline=deadline
                )
                found, _ = await into.find([key], deadline)
                arrived += [key] if found[0] is not None else []
            elif loaded.leases:
                arrived.append(key)
            manager.pool.release(loaded.leases)
    return arrived


async def _remove(
    tier: Tier, keys: Sequence[Key], hidden: Sequence[Key], deadline: float | None
) -> int:
    """Delete what was hidden; where nobody knows yet what is there, everything asked for."""
    if tier.holdings is None or not tier.complete.is_set():
        return (await upkeep.remove(tier, keys, deadline) or 0) if keys else 0
    if hidden:
        await upkeep.sweep(tier, deadline)
    return len(hidden)


async def _search(
    tier: Tier,
    wanted: Callable[[Key], bool] | None,
    deadline: float | None,
    *,
    tag: str = "",
) -> int:
    """Delete values that a store holds and no index knows enough of: those ``wanted``, or under a tag."""
    if not tier.backend.capabilities.scan:
        tier.context.log.warning("tier %s cannot be searched; values stay there", tier.name)
        return 0
    count, after = 0, None
    try:
        while True:
            page = await tier.call("scan", tier.backend.scan(after, limit=PAGE), deadline)
            keys = [key for key, _ in page.values]
            if wanted is not None:
                keys = [key for key in keys if wanted(key)]
            else:
                sizes = {key: each.nbytes for key, each in page.values}
                keys = await _tagged(tier, sizes, tag, deadline)
            if keys:
                upkeep.hide(tier, keys, "deleted")
                count += await upkeep.remove(tier, keys, deadline) or 0
            after = page.after
            if after is None:
                return count
    except BackendError as error:
        tier.context.log.warning("tier %s: search ended early: %s", tier.name, error)
        return count


async def _tagged(tier: Tier, sizes: dict[Key, int], tag: str, deadline: float | None) -> list[Key]:
    """Those values whose header carries the tag."""
    found = []
    keys = list(sizes)
    whole = not tier.backend.capabilities.ranges
    for start in range(0, len(keys), HEADERS):
        batch = keys[start : start + HEADERS]
        if whole:
            batch = [key for key in batch if (await tier.find([key], deadline))[0][0] is not None]
        loads = []
        for key in batch:
            each = (await tier.find([key], deadline))[0][0] if whole else None
            room = memoryview(bytearray(each.nbytes if each is not None else frame.ALIGNMENT))
            loads.append(Load(key, (room,), 0, None if whole else frame.ALIGNMENT))
        results = await tier.call(
            "load", tier.backend.load(loads), deadline, patience=upkeep.PATIENCE
        )
        for load, result in zip(loads, results, strict=True):
            if result.status is LoadStatus.FILLED:
                try:
                    tags = frame.open_header(load.into[0], load.key).tags
                except Corrupt:
                    continue
                if tag in tags:
                    found.append(load.key)
    return found


def _resident(manager: StorageManager) -> Iterator[Key]:
    after: int | None = 0
    while after is not None:
        values, after = manager.pool.scan(after, PAGE)
        yield from (key for key, _ in values)


async def _all(work: list[tuple[Tier, Coroutine[Any, Any, int]]], deadline: float | None) -> int:
    """Run one job per tier, all at once; what is late goes on in the background and is not counted."""
    tasks = [(tier, tier.tasks.start("removal", job)) for tier, job in work]
    count = 0
    for tier, task in tasks:
        seconds = None if deadline is None else deadline - tier.context.clock.now()
        if await settle(task, seconds) and not task.cancelled():
            count += task.result()
    await asyncio.sleep(0)
    return count
