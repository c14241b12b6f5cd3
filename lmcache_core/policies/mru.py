"""Most recently used first: for scans longer than the cache, where the oldest values return first.

Paper: H.-T. Chou, D. J. DeWitt, An evaluation of buffer management strategies for relational
    database systems,
VLDB 1985.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmcache_core.policies.fifo import FIFO
from lmcache_core.policies.queues import first_idle


class MRU(FIFO):
    """The value used last leaves first.

    Insertion order: as most recent. Deviation: of one ``touch`` the first slot counts as the most
    recent, so that leaves still go before the roots they need.
    """

    def touch(self, slots: Sequence[int], /) -> None:
        for slot in reversed(slots):
            self._order.move_to_end(slot)

    def victim(self, busy: Callable[[int], bool], /) -> int | None:
        return first_idle(busy, reversed(self._order))
