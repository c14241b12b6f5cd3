"""Behaviour around a backend. From the manager inwards, always in this order (``ORDER``).

Counting sees everything; the limit keeps what the rest has to carry small; the breaker spares a dead store
the retries; a retry sees one whole attempt, checks included; what is checked is what the manager will use,
so decoding lies inside; chaos plays the store itself.
"""

from lmcache_core.wrappers.breaker import Breaker, BreakerOptions
from lmcache_core.wrappers.chaos import Chaos, ChaosOptions
from lmcache_core.wrappers.check import Check, CheckOptions
from lmcache_core.wrappers.coder import Chain
from lmcache_core.wrappers.ladder import Ladder, LadderOptions
from lmcache_core.wrappers.limit import Limit, LimitOptions
from lmcache_core.wrappers.metrics import Measured
from lmcache_core.wrappers.recode import Serde
from lmcache_core.wrappers.retry import Retried, Retry, RetryOptions
from lmcache_core.wrappers.serde import Encoded

ORDER = ("metrics", "limit", "breaker", "retry", "check", "serde", "chaos")

__all__ = [
    "ORDER",
    "Breaker",
    "BreakerOptions",
    "Chain",
    "Chaos",
    "ChaosOptions",
    "Check",
    "CheckOptions",
    "Encoded",
    "Ladder",
    "LadderOptions",
    "Limit",
    "LimitOptions",
    "Measured",
    "Retried",
    "Retry",
    "RetryOptions",
    "Serde",
]
