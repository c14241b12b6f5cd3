"""Which tier has which value: tiers in configuration order, each asked for what is still missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lmcache_core.spi import Found, Key

if TYPE_CHECKING:
    from lmcache_core.storage.tier import Tier


async def locate(
    tiers: Sequence[Tier],
    keys: Sequence[Key],
    /,
    *,
    deadline: float | None,
    budget: float | None,
    tokens: int,
    now: Callable[[], float],
) -> tuple[list[tuple[Tier, Found] | None], list[str]]:
    """Place of each value, and the tiers that were not asked or did not answer.

    Args:
        budget: clock time by which a shared tier must have answered, besides ``deadline``.
        tokens: of one chunk.
    """
    places: list[tuple[Tier, Found] | None] = [None] * len(keys)
    left = list(range(len(keys)))
    unanswered: list[str] = []
    for tier in list(tiers):
        if not left:
            break
        if not tier.usable or (tier.holdings is None and not tier.gate.asks()):
            unanswered.append(tier.name)
            continue
        times = [
            time
            for time in (deadline, budget if tier.holdings is None else None)
            if time is not None
        ]
        begun = now()
        found, answered = await tier.find([keys[at] for at in left], min(times, default=None))
        if not answered:
            unanswered.append(tier.name)
        hits = [(at, each) for at, each in zip(left, found, strict=True) if each is not None]
        tier.count("asked_chunks_total", len(left))
        tier.count("hit_chunks_total", len(hits))
        tier.count("missed_chunks_total", len(left) - len(hits))
        tier.count("asked_tokens_total", len(left) * tokens)
        tier.count("hit_tokens_total", len(hits) * tokens)
        tier.count("missed_tokens_total", (len(left) - len(hits)) * tokens)
        if tier.holdings is None:
            nbytes = sum(each.nbytes for _, each in hits)
            tier.gate.note_lookup(len(hits), now() - begun, len(hits) * tokens, nbytes)
        for at, each in hits:
            places[at] = (tier, each)
        left = [at for at in left if places[at] is None]
    return places, unanswered
