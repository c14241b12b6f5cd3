"""One batch into one tier: charged before it is written, undone when nobody knows how it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lmcache_core import frame
from lmcache_core.memory.index import NEVER
from lmcache_core.memory.leases import Loan
from lmcache_core.memory.pool import Pool
from lmcache_core.spi import (
    BackendError,
    Corrupt,
    DeadlineExceeded,
    Found,
    Key,
    Store,
    Stored,
    StoreStatus,
)
from lmcache_core.storage import upkeep

if TYPE_CHECKING:
    from lmcache_core.storage.tier import Tier
    from lmcache_core.storage.writing import Parcel


async def store(
    tier: Tier,
    pool: Pool,
    parcels: Mapping[Key, Parcel],
    owner: object,
    /,
    *,
    deadline: float | None = None,
) -> list[Key]:
    """Store resident values in a tier; those that are there or not resident any more are passed over.

    Values deleted meanwhile (``tier.storing`` says so) are removed again when the call has ended.
    Returns those that may succeed another time.
    """
    leases = pool.lease(list(parcels), owner, touch=False)
    waiting = {loan.key: loan for loan in leases if loan and loan.key not in tier.storing}
    storing = list(waiting)
    tier.storing.update(dict.fromkeys(storing, False))
    charged: list[Key] = []
    lent = False

    def over() -> None:
        pool.release(leases)
        for key in storing:
            if tier.storing.pop(key):
                upkeep.undo(tier, key)

    def late() -> None:
        _unknown(tier, charged)
        over()

    try:
        if not waiting or not tier.usable:
            return list(waiting)
        if not await _drop_present(tier, waiting, deadline):
            return list(waiting)
        async with tier.room:
            await _charge(tier, waiting, parcels, charged, deadline)
        if not waiting:
            return []
        keeps = tier.backend.capabilities.ttl
        batch = [
            Store(key, (loan.view,), parcels[key].lifetime(tier) if keeps else None)
            for key, loan in waiting.items()
        ]
        nbytes = sum(item.nbytes for item in batch)
        await tier.prepare(pool.arena)
        lent = True
        try:
            results = await tier.call(
                "store", tier.backend.store(batch), deadline,
                patience=upkeep.PATIENCE, nbytes=lambda: nbytes, late=late,
            )  # fmt: skip
        except DeadlineExceeded:
            return []  # nothing is known and nothing is free before ``late``
        except BackendError:
            lent = False
            _unknown(tier, charged)
            return list(waiting)
        lent = False
        return _settle(tier, pool, waiting, parcels, results)
    finally:
        if not lent:
            over()


async def _drop_present(tier: Tier, waiting: dict[Key, Loan], deadline: float | None) -> bool:
    """Take out what need not be stored; False when the tier does not say."""
    if tier.holdings is None and any(key in tier.bad for key in waiting):
        await upkeep.sweep(tier, deadline)
        for key in [key for key in waiting if key in tier.bad]:
            tier.count("write_back_skipped_total", reason="damaged")
            del waiting[key]
    if tier.holdings is not None:
        old = tier.holdings.expired(list(waiting), tier.context.clock.now())
        upkeep.hide(tier, old, "expired")
    found, answered = await tier.find(list(waiting), deadline)
    for key, each in zip(list(waiting), found, strict=True):
        if each is not None:
            del waiting[key]
    return answered


async def _charge(
    tier: Tier,
    waiting: dict[Key, Loan],
    parcels: Mapping[Key, Parcel],
    charged: list[Key],
    deadline: float | None,
) -> None:
    """Evict and charge; takes out what does not fit."""
    holdings = tier.holdings
    if holdings is None:
        return
    needs = {
        key: holdings.footprint(
            tier.codec.bound(loan.view, key) if tier.codec is not None else loan.extent.nbytes
        )
        for key, loan in waiting.items()
    }
    promised: dict[str, int] = {}
    for key, need in needs.items():
        if not upkeep.evict(tier, need, parcels[key].tenant, promised):
            tier.count("write_back_skipped_total", reason="full")
            del waiting[key]
            if need > holdings.limit and not tier.small:
                tier.small = True
                text = "tier %s is too small: a value takes %d bytes, its limit is %d"
                tier.context.log.warning(text, tier.name, need, holdings.limit)
    if holdings.leaving:
        await upkeep.sweep(tier, deadline)
    charged += [key for key in waiting if holdings.charge(key, needs[key])]
    for key in waiting.keys() - {*charged}:
        tier.count("write_back_skipped_total", reason="full")
        del waiting[key]


def _settle(
    tier: Tier,
    pool: Pool,
    waiting: Mapping[Key, Loan],
    parcels: Mapping[Key, Parcel],
    results: Sequence[Stored],
) -> list[Key]:
    again = []
    now = tier.context.clock.now()
    # Leaves first: the policy sees the root of a prefix as the most recent.
    for (key, loan), result in reversed([*zip(waiting.items(), results, strict=True)]):
        length, parcel = loan.extent.nbytes, parcels[key]
        if result.status in (StoreStatus.STORED, StoreStatus.PRESENT):
            stored = tier.stored_nbytes(key, length)
            if tier.holdings is None:
                tier.answers.put(key, Found(stored), now)
                tier.learn(key, length)
            else:
                tags = parcel.tags
                life = parcel.lifetime(tier)
                expires = NEVER if life is None else now + life
                if tags is None:
                    tags = frame.open_header(loan.view, key).tags
                if tier.holdings.arrived(
                    key, stored, length,
                    tenant=parcel.tenant, cost=parcel.cost, expires=expires, tags=tags,
                ):  # fmt: skip
                    tier.count("in_bytes_total", tier.holdings.footprint(stored), how="stored")
        elif result.status is StoreStatus.REFUSED:
            tier.count("write_back_skipped_total", reason="refused")
            if tier.holdings is not None:
                tier.holdings.cancel(key)
        else:
            _unknown(tier, [key])
            if isinstance(result.error, Corrupt):
                # What is resident has rotted: nobody may get it any more, here or elsewhere.
                tier.context.log.warning("resident value is damaged, dropping it: %s", result.error)
                pool.drop([key])
            else:
                again.append(key)
    tier.publish()
    return again[::-1]


def _unknown(tier: Tier, keys: Sequence[Key]) -> None:
    """Stores that ended nobody knows how: what may be there stays charged until it is deleted."""
    if tier.holdings is None:
        for key in keys:
            tier.answers.drop(key)
        return
    for key in keys:
        tier.holdings.doubt(key)
    if keys and not tier.closing:
        tier.tasks.start("undo", upkeep.sweep(tier, None))
