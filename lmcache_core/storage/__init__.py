"""The storage manager: tiers, index, deadlines, quarantine, prefetch, write-back, cost gate."""

from lmcache_core.storage.results import (
    Flushed,
    Listing,
    Loaded,
    Lookup,
    Outcome,
    Place,
    Reason,
    Shutdown,
)

__all__ = [
    "Flushed",
    "Listing",
    "Loaded",
    "Lookup",
    "Outcome",
    "Place",
    "Reason",
    "Shutdown",
]
