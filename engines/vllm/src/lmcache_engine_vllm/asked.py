"""What the scheduler's half knows of one request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lmcache_core.identity import Chain
from lmcache_core.wire.grants import RemoteLeases
from lmcache_engine_vllm.identity import Wishes
from lmcache_engine_vllm.steps import Tables


@dataclass(slots=True)
class Asked:
    """One request.

    Attributes:
        chain: digests of its chunks as far as its tokens are known.
        leases, spots: what the cache offers; ``reach``: up to which token.
        until: an empty answer is not asked for again before.
        local: tokens the engine had by itself when it asked last.
        plan: token range the engine has allocated for the offer.
        base: tokens from here on were computed by the request itself since it was admitted; None before.
        computed: tokens that are computed when the steps so far are.
        kept: chunks that the cache has or was told to take.
        fill: tokens that count as prompt; those behind it were generated since.
        over: tells whether what lower tiers have is on its way no more; None when nothing is.
        patience: until when the request waits for that; None before it was asked for.
        probe: the offer is not made but compared with what is computed; None before that was decided.
        tables: blocks of a plan that is carried out while the request waits.
    """

    request: Any
    wishes: Wishes
    chain: Chain
    leases: RemoteLeases | None = None
    spots: tuple[int, ...] = ()
    reach: int = 0
    until: float = 0.0
    local: int = 0
    plan: tuple[int, int] | None = None
    base: int | None = None
    computed: int = 0
    kept: int = 0
    fill: int = 0
    told: bool = False
    over: Callable[[], bool] | None = None
    patience: float | None = None
    probe: bool | None = None
    tables: Tables | None = None
    held: list[RemoteLeases] = field(default_factory=list)
