"""What a tier loses and gets back: removal, eviction, repair, recovery after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from lmcache_core.memory.index import NEVER
from lmcache_core.spi import BackendError, Damaged, DeadlineExceeded, Evicted, Key

if TYPE_CHECKING:
    from lmcache_core.storage.tier import Tier

SWEEP = 256
"""Most values of one background deletion."""
SHRINK_PAUSE_S = 0.05
PATIENCE = 10.0
"""Writes and deletions, which nobody waits for, may take so many times the tier's deadline."""


def lose(tier: Tier, key: Key, /) -> None:
    """The backend has not got what was expected: believe it."""
    tier.answers.drop(key)
    if tier.holdings is not None and (slot := tier.holdings.index.slot_of(key)) >= 0:
        tier.count("out_bytes_total", tier.holdings.lost(slot), why="lost")


def damaged(tier: Tier, key: Key, error: BackendError, /) -> None:
    """A value failed verification: no more hits, and removal before its key is stored again."""
    tier.context.log.warning("tier %s: damaged value, removing it: %s", tier.name, error)
    tier.count("damaged_total", reason=type(error).__name__)
    tier.context.emit(Damaged(tier=tier.name, key=key.text, reason=str(error)))
    if tier.holdings is None:
        said = tier.answers.get(key, tier.context.clock.now())
        tier.bad[key] = said[0].etag if said and said[0] else None
        tier.answers.drop(key)
    else:
        hide(tier, [key], "damaged")
        tier.holdings.leaving.setdefault(key, 0)
    tier.tasks.start("repair", sweep(tier, None))


def hide(tier: Tier, keys: Sequence[Key], why: str, /) -> list[Key]:
    """Make values invisible at once; they still have to be removed. Returns those that were there.

    In a shared tier only the store knows what is there: all of them are returned.
    """
    if tier.holdings is None:
        for key in keys:
            tier.answers.drop(key)
        return list(keys)
    if tier.gone is not None:
        tier.gone.update(keys)
    hidden = []
    for key in keys:
        if (slot := tier.holdings.index.slot_of(key)) >= 0:
            hidden.append(tier.holdings.hide(slot))
            tier.count("out_bytes_total", tier.holdings.leaving[key], why=why)
    return hidden


async def sweep(tier: Tier, deadline: float | None, /) -> list[Key]:
    """Delete what is invisible but still there; returns what is left and not being deleted."""
    if tier.holdings is None:
        for key, etag in list(tier.bad.items()):
            if (
                key not in tier.deleting
                and await remove(tier, [key], deadline, etag=etag) is not None
            ):
                tier.bad.pop(key, None)
        return [*tier.bad]
    leaving, deleting = tier.holdings.leaving, tier.deleting
    while batch := list(islice((key for key in leaving if key not in deleting), SWEEP)):
        if await remove(tier, batch, deadline) is None:
            break
    return [key for key in leaving if key not in deleting]


async def remove(
    tier: Tier, keys: Sequence[Key], deadline: float | None, /, *, etag: str | None = None
) -> int | None:
    """Delete in the backend; None when it is not known to have happened."""
    tier.deleting.update(keys)

    def ended() -> None:
        tier.deleting.difference_update(keys)

    if etag is not None and tier.backend.capabilities.conditional_delete:
        work: Coroutine[Any, Any, Any] = tier.backend.delete_exact(keys[0], etag)
    else:
        work = tier.backend.delete(keys)
    try:
        count = int(await tier.call("delete", work, deadline, patience=PATIENCE, late=ended))
    except DeadlineExceeded:
        return None
    except BackendError:
        ended()
        return None
    ended()
    if tier.holdings is not None:
        tier.holdings.left(keys)
        tier.publish()
    return count


def evict(tier: Tier, need: int, tenant: str, promised: dict[str, int], /) -> bool:
    """Hide victims so that a charge of ``need`` bytes will fit once they are swept; False: it never will now.

    ``promised`` collects the charges decided so far. The caller holds ``room``.
    """
    assert tier.holdings is not None and tier.room.locked()
    victims = tier.holdings.victims(need, tenant, promised=promised)
    if victims is None:
        return False
    promised[tenant] = promised.get(tenant, 0) + need
    _tell(tier, victims)
    return True


def _tell(tier: Tier, victims: Sequence[Key]) -> None:
    """Count values that are to leave for want of room, and say so."""
    if victims:
        assert tier.holdings is not None
        freed = sum(tier.holdings.leaving[key] for key in victims)
        tier.count("out_bytes_total", freed, why="evicted")
        tier.count("evicted_chunks_total", len(victims))
        tier.context.emit(Evicted(tier=tier.name, count=len(victims), nbytes=freed))


async def shrink(tier: Tier, deadline: float | None, /) -> None:
    """Evict down to the limit, after it shrank or recovery found too much; waits for values in use."""
    holdings, clock = tier.holdings, tier.context.clock
    assert holdings is not None
    while holdings.used > holdings.limit:
        async with tier.room:
            _tell(tier, holdings.excess())
            await sweep(tier, deadline)
        if holdings.used > holdings.limit:
            if deadline is not None and clock.now() >= deadline:
                return
            await clock.sleep(SHRINK_PAUSE_S)


def undo(tier: Tier, key: Key, /) -> None:
    """A value that was deleted while it was being written has arrived: remove it again."""
    hide(tier, [key], "deleted")
    if tier.holdings is None:
        tier.bad[key] = None
    if not tier.closing:
        tier.tasks.start("undo", sweep(tier, None))


async def recover(tier: Tier, /) -> None:
    """Fill the holdings from the store while serving; writes wait for the end, lookups ask meanwhile."""
    assert tier.holdings is not None
    tier.gone = set()
    after: str | None = None
    pause = 1.0
    while True:
        try:
            page = await tier.backend.scan(after)
        except BackendError as error:
            tier.context.log.warning("tier %s: recovery waits: %s", tier.name, error)
            await tier.context.clock.sleep(pause)
            pause = min(pause * 2, 60.0)
            continue
        for key, found in page.values:
            if key in tier.holdings.leaving or tier.holdings.index.slot_of(key) >= 0:
                continue
            if key in tier.gone:  # whether it went after this page was read, or could not
                tier.holdings.doubt(key, found.nbytes)
                continue
            expires = NEVER if found.expires is None else found.expires
            tier.holdings.arrived(
                key, found.nbytes, 0 if tier.codec else found.nbytes, expires=expires
            )
            tier.recovered = True
            tier.count("in_bytes_total", tier.backend.footprint(found.nbytes), how="recovered")
        if page.foreign:
            names = ", ".join(page.foreign[:5])
            tier.context.log.warning(
                "tier %s holds %d things that are not ours: %s", tier.name, len(page.foreign), names
            )
        after = page.after
        if after is None:
            break
        await asyncio.sleep(0)
    tier.gone = None
    await shrink(tier, None)
    tier.publish()
    tier.complete.set()
